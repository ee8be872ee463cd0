//! The abstract machine that a schedule is replayed on: places with contents, five lanes, and a
//! scheduler that picks which lane goes on.
//!
//! - An action takes time: it starts, and later it ends. Between the two its writes are garbage,
//!   and two running actions that touch one place, one of them writing, are a violation.
//! - A content says what it is: whose, of which step or version. Each action checks what it reads,
//!   when it starts and when it ends.
//! - Lanes run as far ahead as the `after` lists let them, also from one step into the next.

use std::collections::{BTreeMap, BTreeSet};

use terrace::plan::Home;
use terrace::plan::Plan;
use terrace::schedule::{
    Accumulator, Action, Buffer, Finished, Form, GradientSlot, Lane, Schedule,
};
use terrace::store::sim::mix;
use terrace::tile::Section;

/// An action of one of the steps.
pub(crate) type At = (u64, usize);

/// What a place can hold; a place that holds nothing is absent.
#[derive(Clone, Debug, PartialEq)]
enum Content {
    /// Tiles' weights with the updates that they have had.
    Weights(Vec<(u16, u64)>),
    /// The input of a layer, in a step.
    Input(u16, u64),
    /// The gradient of the input of a layer, in a step.
    Gradient(u16, u64),
    /// Activations of (layer, micro) of a step.
    Kept(u16, u32, u64),
    /// A gradient under way: layer, step, contributions, whether it is finished.
    Sum(u16, u64, u32, bool),
    /// A finished gradient: layer and step.
    Waiting(u16, u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// A tile's sections that are not on the device.
    Home(u16),
    /// Rows of the embed tile that the next step names, where they are updated first; its home is
    /// then the others.
    Rows,
    /// A weight section that lives on the device.
    DeviceHome(u16),
    WeightSlot(u32),
    Parked(u16),
    Buffer(u32),
    HeadBuffer,
    /// By row and micro-batch.
    Anchor(u16, u32),
    /// An anchor in host or in the store.
    HostAnchor(u16, u32),
    Kept(u32),
    BlockSum(u32),
    HeadSum,
    EmbedSum,
    Slot(u32),
    /// A step's table of norms.
    Norm(u64),
}

/// What an action does to a place.
#[derive(Clone, Debug, PartialEq)]
enum Access {
    /// It must hold this, and still does afterwards.
    Reads(Content),
    /// It is overwritten; what it held is lost.
    Writes(Content),
    /// It must hold the first and holds the second afterwards.
    Turns(Option<Content>, Option<Content>),
}

/// Every place that an action touches.
type Accesses = Vec<(Place, Access)>;

const LANES: usize = Lane::ALL.len();

/// One replay.
pub(crate) struct Machine<'a> {
    plan: &'a Plan,
    schedule: &'a Schedule,
    rows_first: bool,
    steps: u64,
    lanes: Vec<Vec<usize>>,
    /// Actions done by each lane, over all steps.
    done_of_lane: [usize; LANES],
    running: [Option<(At, Accesses)>; LANES],
    /// By action: steps in which it is done.
    done: Vec<u64>,
    places: BTreeMap<Place, Content>,
    /// Buffer, layer and uses left of what is bound.
    bound: Option<(Place, u16, u32)>,
    /// Updates by (layer, step).
    updates: BTreeSet<(u16, u64)>,
}

impl<'a> Machine<'a> {
    pub(crate) fn new(plan: &'a Plan, schedule: &'a Schedule, steps: u64) -> Machine<'a> {
        let homes = (0..plan.layer_count()).flat_map(|layer| {
            let weights = || Content::Weights(vec![(layer, 0)]);
            let on_device = lives_on_device(plan, layer);
            let device = on_device.then(|| (Place::DeviceHome(layer), weights()));
            [(Place::Home(layer), weights())].into_iter().chain(device)
        });
        let is_rows = |action| matches!(action, Action::UpdateRows { .. });
        let rows_first = schedule.actions.iter().any(|s| is_rows(s.action));
        let rows = rows_first.then(|| (Place::Rows, Content::Weights(vec![(0, 0)])));
        Machine {
            plan,
            schedule,
            rows_first,
            steps,
            lanes: Lane::ALL
                .iter()
                .map(|lane| schedule.lane(*lane).collect())
                .collect(),
            done_of_lane: [0; LANES],
            running: [const { None }; LANES],
            done: vec![0; schedule.actions.len()],
            places: homes.chain(rows).collect(),
            bound: None,
            updates: BTreeSet::new(),
        }
    }

    /// Replays to the end with lanes picked by a seed.
    pub(crate) fn finish_at_random(&mut self, seed: u64) -> Result<(), String> {
        let mut state = mix(seed);
        while !self.has_ended() {
            state = mix(state);
            let pick = state;
            let able: Vec<usize> = (0..LANES).filter(|lane| self.is_able(*lane)).collect();
            if able.is_empty() {
                return Err("no lane can go on".to_string());
            }
            self.advance(able[(pick % able.len() as u64) as usize])?;
        }
        self.check_end()
    }

    /// Replays to the end; the first lane of `order` that can go on does.
    pub(crate) fn finish_in_order(&mut self, order: [usize; LANES]) -> Result<(), String> {
        while !self.has_ended() {
            let able = order.into_iter().find(|lane| self.is_able(*lane));
            self.advance(able.ok_or("no lane can go on")?)?;
        }
        self.check_end()
    }

    /// Starts `target` with nothing done but what it waits for. An error is a violation: that
    /// something waits in a circle is a panic, so that it does not pass for one.
    pub(crate) fn start_early(&mut self, target: At) -> Result<(), String> {
        let needed = ancestors(self.schedule, target);
        let lane = self.schedule.actions[target.1].lane as usize;
        loop {
            if self.running[lane].is_none() && self.next(lane) == Some(target) {
                if self.is_able(lane) {
                    return self.advance(lane);
                }
            } else if self.is_past(target) {
                return Ok(());
            }
            let able = (0..LANES).find(|lane| {
                let at = match &self.running[*lane] {
                    Some((at, _)) => Some(*at),
                    None => self.next(*lane).filter(|_| self.is_able(*lane)),
                };
                at.is_some_and(|at| needed.contains(&at))
            });
            self.advance(able.expect("what the target waits for can run"))?;
        }
    }

    /// Ends `target`, which has been started.
    pub(crate) fn end(&mut self, target: At) -> Result<(), String> {
        let lane = self.schedule.actions[target.1].lane as usize;
        match &self.running[lane] {
            Some((at, _)) if *at == target => self.advance(lane),
            _ => Ok(()),
        }
    }

    fn has_ended(&self) -> bool {
        (0..LANES).all(|lane| self.running[lane].is_none() && self.next(lane).is_none())
    }

    fn is_past(&self, (step, index): At) -> bool {
        let lane = self.schedule.actions[index].lane as usize;
        self.done[index] > step
            || self.running[lane]
                .as_ref()
                .is_some_and(|(at, _)| *at == (step, index))
    }

    fn next(&self, lane: usize) -> Option<At> {
        let (actions, done) = (&self.lanes[lane], self.done_of_lane[lane]);
        let step = done.checked_div(actions.len())? as u64;
        (step < self.steps).then(|| (step, actions[done % actions.len()]))
    }

    fn is_able(&self, lane: usize) -> bool {
        if self.running[lane].is_some() {
            return true;
        }
        self.next(lane).is_some_and(|(step, index)| {
            let after = &self.schedule.actions[index].after;
            after
                .iter()
                .all(|after| self.done[after.action as usize] + u64::from(after.previous) > step)
        })
    }

    /// Ends what the lane runs, or starts its next action.
    fn advance(&mut self, lane: usize) -> Result<(), String> {
        let Some((at, accesses)) = self.running[lane].take() else {
            let at = self.next(lane).expect("the lane is able");
            let accesses = self
                .start(at)
                .map_err(|e| self.describe(at, "starts", &e))?;
            self.running[lane] = Some((at, accesses));
            return Ok(());
        };
        self.stop(at, accesses)
            .map_err(|e| self.describe(at, "ends", &e))?;
        self.done_of_lane[lane] += 1;
        self.done[at.1] += 1;
        assert_eq!(self.done[at.1], at.0 + 1);
        Ok(())
    }

    fn describe(&self, (step, index): At, when: &str, what: &str) -> String {
        let action = self.schedule.actions[index].action;
        format!("step {step}, action {index} {action:?} {when}: {what}")
    }

    fn start(&mut self, at: At) -> Result<Accesses, String> {
        let accesses = self.accesses(at)?;
        for (other, theirs) in self.running.iter().flatten() {
            for (place, access) in &accesses {
                let shared = theirs
                    .iter()
                    .find(|(their, _)| self.is_same(*their, *place));
                let writes = |access: &Access| !matches!(access, Access::Reads(_));
                if shared.is_some_and(|(_, their)| writes(access) || writes(their)) {
                    let other = self.schedule.actions[other.1].action;
                    return Err(format!("{place:?} is in use by {other:?}"));
                }
            }
        }
        for (place, access) in &accesses {
            let place = self.memory(*place);
            let held = self.places.get(&place).cloned();
            match access {
                Access::Reads(wanted) => expect(place, held, Some(wanted.clone()))?,
                Access::Turns(wanted, _) => {
                    expect(place, held, wanted.clone())?;
                    self.places.remove(&place);
                }
                Access::Writes(_) => {
                    self.places.remove(&place);
                }
            }
        }
        Ok(accesses)
    }

    fn stop(&mut self, (step, index): At, accesses: Accesses) -> Result<(), String> {
        for (place, access) in accesses {
            let place = self.memory(place);
            let held = self.places.get(&place).cloned();
            match access {
                Access::Reads(wanted) => expect(place, held, Some(wanted))?,
                Access::Writes(content) | Access::Turns(_, Some(content)) => {
                    expect(place, held, None)?;
                    self.places.insert(place, content);
                }
                Access::Turns(_, None) => expect(place, held, None)?,
            }
        }
        match self.schedule.actions[index].action {
            Action::Bind { layer, buffer } => {
                let uses = self.schedule.micros;
                self.bound = Some((buffer_place(buffer), layer, uses));
            }
            Action::Update { layer, .. } if !self.updates.insert((layer, step)) => {
                return Err(format!("layer {layer} is updated twice"));
            }
            _ => {}
        }
        Ok(())
    }

    /// Head and embed sums are one memory unless the model is tied.
    fn memory(&self, place: Place) -> Place {
        match place {
            Place::EmbedSum if !self.plan.tied => Place::HeadSum,
            place => place,
        }
    }

    fn is_same(&self, a: Place, b: Place) -> bool {
        self.memory(a) == self.memory(b)
    }

    /// Takes one use of what is bound, and says what its buffer must hold.
    fn take_use(&mut self, layer: u16, step: u64) -> Result<(Place, Access), String> {
        let weights = self.weights(layer, step);
        match &mut self.bound {
            Some((buffer, bound, uses)) if *bound == layer && *uses > 0 => {
                *uses -= 1;
                Ok((*buffer, Access::Reads(Content::Weights(weights))))
            }
            other => Err(format!("{other:?} is bound")),
        }
    }

    /// Every place that the action touches.
    fn accesses(&mut self, at: At) -> Result<Accesses, String> {
        match self.schedule.actions[at.1].action {
            Action::DemoteAnchor { .. } | Action::PromoteAnchor { .. } => {
                Ok(self.accesses_of_anchors(at))
            }
            Action::Gather { .. } | Action::Promote { .. } | Action::Bind { .. } => {
                self.accesses_of_weights(at)
            }
            Action::Clear { .. }
            | Action::Finish { .. }
            | Action::Park { .. }
            | Action::Demote { .. }
            | Action::Clip
            | Action::UpdateRows { .. }
            | Action::Update { .. } => Ok(self.accesses_of_gradients(at)),
            Action::DemoteWeight { .. } | Action::Return { .. } => {
                Ok(self.accesses_of_device_weights(at))
            }
            Action::Backward { .. } | Action::EmbedBackward { .. } => self.accesses_of_backward(at),
            _ => self.accesses_of_forward(at),
        }
    }

    /// Updates that weights must have had.
    fn version(&self, step: u64) -> u64 {
        if self.schedule.form == Form::Train {
            step
        } else {
            0
        }
    }

    fn head(&self) -> u16 {
        self.plan.layer_count() - 1
    }

    /// What a layer's buffer must hold.
    fn weights(&self, layer: u16, step: u64) -> Vec<(u16, u64)> {
        let mut weights = vec![(layer, self.version(step))];
        if layer == self.head() && self.plan.tied {
            weights.push((0, self.version(step)));
        }
        weights
    }

    fn home(&self, layer: u16, step: u64) -> (Place, Access) {
        let content = Content::Weights(vec![(layer, self.version(step))]);
        (Place::Home(layer), Access::Reads(content))
    }

    fn rows(&self, step: u64) -> (Place, Access) {
        let content = Content::Weights(vec![(0, self.version(step))]);
        (Place::Rows, Access::Reads(content))
    }

    fn accesses_of_weights(&self, (step, index): At) -> Result<Accesses, String> {
        use Access::{Reads, Writes};
        let (head, tied) = (self.head(), self.plan.tied);
        let anchor = self.anchor_place();
        Ok(match self.schedule.actions[index].action {
            Action::Gather { micro } => vec![
                match self.rows_first {
                    true => self.rows(step),
                    false => self.home(0, step),
                },
                (anchor(1, micro), Writes(Content::Input(1, step))),
            ],
            Action::Promote { layer, buffer } => {
                let place = buffer_place(buffer);
                if let Some((bound, layer, uses)) = self.bound
                    && bound == place
                    && uses > 0
                {
                    return Err(format!("{place:?} is bound to layer {layer}"));
                }
                let mut accesses = vec![
                    self.home(layer, step),
                    (place, Writes(Content::Weights(self.weights(layer, step)))),
                ];
                if layer == head && tied {
                    accesses.push(self.home(0, step));
                    accesses.extend(self.rows_first.then(|| self.rows(step)));
                }
                accesses
            }
            Action::Bind { layer, buffer } => {
                if let Some((_, bound, uses)) = self.bound
                    && uses > 0
                {
                    return Err(format!("layer {bound} has {uses} uses left"));
                }
                vec![(
                    buffer_place(buffer),
                    Reads(Content::Weights(self.weights(layer, step))),
                )]
            }
            other => unreachable!("{other:?}"),
        })
    }

    fn accesses_of_forward(&mut self, (step, index): At) -> Result<Accesses, String> {
        use Access::{Reads, Turns, Writes};
        let (head, tied) = (self.head(), self.plan.tied);
        let anchor = self.anchor_place();
        Ok(match self.schedule.actions[index].action {
            Action::Forward { layer, micro, keep } => {
                let mut accesses = vec![
                    self.take_use(layer, step)?,
                    (anchor(layer, micro), Reads(Content::Input(layer, step))),
                    (
                        anchor(layer + 1, micro),
                        Writes(Content::Input(layer + 1, step)),
                    ),
                ];
                let kept = |slot| {
                    (
                        Place::Kept(slot),
                        Turns(None, Some(Content::Kept(layer, micro, step))),
                    )
                };
                accesses.extend(keep.map(kept));
                accesses
            }
            Action::Rebuild { layer, micro } => {
                let before = layer - 1;
                vec![
                    self.take_use(before, step)?,
                    (anchor(before, micro), Reads(Content::Input(before, step))),
                    (anchor(layer, micro), Writes(Content::Input(layer, step))),
                ]
            }
            Action::ForwardOnly { layer, micro } => vec![
                self.take_use(layer, step)?,
                (
                    anchor(1, micro),
                    Turns(
                        Some(Content::Input(layer, step)),
                        Some(Content::Input(layer + 1, step)),
                    ),
                ),
            ],
            Action::Evaluate { micro } | Action::Logits { micro } => vec![
                self.take_use(head, step)?,
                (anchor(1, micro), Reads(Content::Input(head, step))),
            ],
            Action::Loss { micro } => {
                let gradient = Content::Gradient(head, step);
                let mut accesses = vec![
                    self.take_use(head, step)?,
                    (
                        anchor(head, micro),
                        Turns(Some(Content::Input(head, step)), Some(gradient)),
                    ),
                    self.adds(Place::HeadSum, head, step, micro),
                ];
                if tied {
                    accesses.push(self.adds(Place::EmbedSum, 0, step, micro));
                }
                accesses
            }
            other => unreachable!("{other:?}"),
        })
    }

    fn accesses_of_backward(&mut self, (step, index): At) -> Result<Accesses, String> {
        use Access::{Reads, Turns};
        let (head, tied) = (self.head(), self.plan.tied);
        let anchor = self.anchor_place();
        Ok(match self.schedule.actions[index].action {
            Action::Backward {
                layer,
                micro,
                kept,
                accumulator,
            } => {
                let (from, to) = (
                    Content::Gradient(layer + 1, step),
                    Content::Gradient(layer, step),
                );
                let mut accesses = vec![
                    self.take_use(layer, step)?,
                    (anchor(layer, micro), Reads(Content::Input(layer, step))),
                    (anchor(head, micro), Turns(Some(from), Some(to))),
                    self.adds(sum_place(accumulator), layer, step, micro),
                ];
                let consumed = |slot| {
                    (
                        Place::Kept(slot),
                        Turns(Some(Content::Kept(layer, micro, step)), None),
                    )
                };
                accesses.extend(kept.map(consumed));
                accesses
            }
            Action::EmbedBackward { micro } => {
                let before = if tied { self.schedule.micros } else { 0 };
                vec![
                    (anchor(head, micro), Reads(Content::Gradient(1, step))),
                    self.adds(Place::EmbedSum, 0, step, before + micro),
                ]
            }
            other => unreachable!("{other:?}"),
        })
    }

    fn accesses_of_gradients(&self, (step, index): At) -> Accesses {
        use Access::{Reads, Turns};
        let (head, tied) = (self.head(), self.plan.tied);
        match self.schedule.actions[index].action {
            Action::Clear { layer, accumulator } => {
                let empty = Content::Sum(layer, step, 0, false);
                vec![(sum_place(accumulator), Turns(None, Some(empty)))]
            }
            Action::Finish { layer, accumulator } => {
                let both = layer == 0 && tied;
                let count = self.schedule.micros * if both { 2 } else { 1 };
                let turn = |finished| Some(Content::Sum(layer, step, count, finished));
                vec![
                    (sum_place(accumulator), Turns(turn(false), turn(true))),
                    norm_turn(step, self.finished(index), self.finished(index) + 1),
                ]
            }
            Action::Park { layer, accumulator } => {
                let mut accesses = vec![(
                    sum_place(accumulator),
                    Turns(Some(self.complete(layer, step)), None),
                )];
                let waiting = Content::Waiting(layer, step);
                accesses.extend(self.parked(layer).into_iter().map(|place| match place {
                    // The anchors that were there are used up.
                    Place::Anchor(..) => (place, Access::Writes(waiting.clone())),
                    _ => (place, Turns(None, Some(waiting.clone()))),
                }));
                accesses
            }
            Action::Demote { layer, from, slot } => {
                let waiting = Content::Waiting(layer, step);
                let (places, content) = match from {
                    Finished::In(accumulator) => {
                        (vec![sum_place(accumulator)], self.complete(layer, step))
                    }
                    Finished::Parked => (self.parked(layer), waiting.clone()),
                };
                let mut accesses = vec![(slot_place(slot), Turns(None, Some(waiting)))];
                let left = |place| (place, Turns(Some(content.clone()), None));
                accesses.extend(places.into_iter().map(left));
                accesses
            }
            Action::Clip => {
                let all = u32::from(head) + 1;
                vec![norm_turn(step, all, CLIPPED)]
            }
            Action::UpdateRows { slot } => {
                let weights = |version| Some(Content::Weights(vec![(0, version)]));
                let waiting = Content::Waiting(0, step);
                let mut accesses = vec![
                    (Place::Rows, Turns(weights(step), weights(step + 1))),
                    (slot_place(slot), Reads(waiting)),
                ];
                accesses.extend(self.plan.clipping.then(|| clipped(step)));
                accesses
            }
            Action::Update {
                layer,
                slot,
                weight,
            } => {
                let (from, to) = (vec![(layer, step)], vec![(layer, step + 1)]);
                let turn = Turns(Some(Content::Weights(from)), Some(Content::Weights(to)));
                let mut accesses = vec![
                    (Place::Home(layer), turn.clone()),
                    (
                        slot_place(slot),
                        Turns(Some(Content::Waiting(layer, step)), None),
                    ),
                ];
                accesses.extend(weight.map(|slot| (Place::WeightSlot(slot), turn)));
                accesses.extend(self.plan.clipping.then(|| clipped(step)));
                // What went first is part of the tile.
                if layer == 0 && self.rows_first {
                    let content = Content::Weights(vec![(0, step + 1)]);
                    accesses.push((Place::Rows, Reads(content)));
                }
                accesses
            }
            other => unreachable!("{other:?}"),
        }
    }

    /// Where a layer's finished gradient waits on the device.
    fn parked(&self, layer: u16) -> Vec<Place> {
        let map = &self.plan.map;
        if !map.waits_in_row(layer) {
            return vec![Place::Parked(layer)];
        }
        let elements = self.plan.tiles[usize::from(layer)].layout.elements;
        let anchors = (elements * self.plan.gradient_bytes).div_ceil(map.anchor_bytes) as u32;
        assert!(anchors <= self.schedule.micros);
        let anchor = self.anchor_place();
        (0..anchors).map(|micro| anchor(layer, micro)).collect()
    }

    /// Where the anchor of (layer, micro) is on the device: a pass without gradients computes in
    /// place on the first row.
    fn anchor_place(&self) -> impl Fn(u16, u32) -> Place + use<'a> {
        let (plan, trains) = (self.plan, self.schedule.form == Form::Train);
        move |layer, micro| {
            let row = if trains {
                plan.map.anchor_rows.row(layer)
            } else {
                0
            };
            Place::Anchor(row, micro)
        }
    }

    /// A block's anchor, away from the device and back.
    fn accesses_of_anchors(&self, (step, index): At) -> Accesses {
        use Access::{Reads, Turns, Writes};
        let row = self.anchor_place();
        match self.schedule.actions[index].action {
            Action::DemoteAnchor { layer, micro } => {
                let input = Content::Input(layer, step);
                vec![
                    (row(layer, micro), Reads(input.clone())),
                    (Place::HostAnchor(layer, micro), Turns(None, Some(input))),
                ]
            }
            Action::PromoteAnchor { layer, micro } => {
                let input = Content::Input(layer, step);
                vec![
                    (
                        Place::HostAnchor(layer, micro),
                        Turns(Some(input.clone()), None),
                    ),
                    (row(layer, micro), Writes(input)),
                ]
            }
            other => unreachable!("{other:?}"),
        }
    }

    /// A weight section that lives on the device, down for its update and back.
    fn accesses_of_device_weights(&self, (step, index): At) -> Accesses {
        use Access::Turns;
        let weights = |layer, version| Some(Content::Weights(vec![(layer, version)]));
        match self.schedule.actions[index].action {
            // From here until it returns, nobody may use the home.
            Action::DemoteWeight { layer, slot } => vec![
                (Place::DeviceHome(layer), Turns(weights(layer, step), None)),
                (Place::WeightSlot(slot), Turns(None, weights(layer, step))),
            ],
            Action::Return { layer, slot } => vec![
                (
                    Place::WeightSlot(slot),
                    Turns(weights(layer, step + 1), None),
                ),
                (
                    Place::DeviceHome(layer),
                    Turns(None, weights(layer, step + 1)),
                ),
            ],
            other => unreachable!("{other:?}"),
        }
    }

    /// A finished sum with all its contributions.
    fn complete(&self, layer: u16, step: u64) -> Content {
        let both = layer == 0 && self.plan.tied;
        let count = self.schedule.micros * if both { 2 } else { 1 };
        Content::Sum(layer, step, count, true)
    }

    /// One more contribution to a sum; contributions come in the order of micro-batches.
    fn adds(&self, place: Place, layer: u16, step: u64, before: u32) -> (Place, Access) {
        let sum = |count| Some(Content::Sum(layer, step, count, false));
        (place, Access::Turns(sum(before), sum(before + 1)))
    }

    /// Tiles finished before this action, in the step.
    fn finished(&self, index: usize) -> u32 {
        let before = &self.schedule.actions[..index];
        let finished = before
            .iter()
            .filter(|s| matches!(s.action, Action::Finish { .. }));
        finished.count() as u32
    }

    fn check_end(&self) -> Result<(), String> {
        let layers = u64::from(self.plan.layer_count());
        let trains = self.schedule.form == Form::Train;
        let version = if trains { self.steps } else { 0 };
        if self.updates.len() as u64 != layers * version {
            return Err(format!("{} updates", self.updates.len()));
        }
        for (place, content) in &self.places {
            let right = match (place, content) {
                (Place::Rows, content) => *content == Content::Weights(vec![(0, version)]),
                (Place::Home(layer) | Place::DeviceHome(layer), content) => {
                    *content == Content::Weights(vec![(*layer, version)])
                }
                (Place::Kept(_) | Place::BlockSum(_) | Place::HeadSum, _) => false,
                (Place::EmbedSum | Place::Slot(_) | Place::Parked(_), _) => false,
                (Place::WeightSlot(_) | Place::HostAnchor(..), _) => false,
                _ => true,
            };
            if !right {
                return Err(format!("at the end {place:?} holds {content:?}"));
            }
        }
        match self.bound {
            Some((_, layer, uses)) if uses > 0 => Err(format!("layer {layer} is still bound")),
            _ => Ok(()),
        }
    }
}

/// Count of norms that stands for the clipped global norm.
const CLIPPED: u32 = u32::MAX;

fn expect(place: Place, held: Option<Content>, wanted: Option<Content>) -> Result<(), String> {
    if held == wanted {
        return Ok(());
    }
    Err(format!("{place:?} holds {held:?}, not {wanted:?}"))
}

/// The norm must be known.
fn clipped(step: u64) -> (Place, Access) {
    let content = Content::Sum(0, step, CLIPPED, true);
    (Place::Norm(step), Access::Reads(content))
}

/// The table of norms goes from `from` entries to `to`.
fn norm_turn(step: u64, from: u32, to: u32) -> (Place, Access) {
    let table = |count| (count > 0).then_some(Content::Sum(0, step, count, true));
    (Place::Norm(step), Access::Turns(table(from), table(to)))
}

fn lives_on_device(plan: &Plan, layer: u16) -> bool {
    plan.tiles[usize::from(layer)].home(Section::Weight) == Home::Device
}

fn buffer_place(buffer: Buffer) -> Place {
    match buffer {
        Buffer::Block(index) => Place::Buffer(index),
        Buffer::Head => Place::HeadBuffer,
        Buffer::Home(layer) => Place::DeviceHome(layer),
    }
}

fn sum_place(accumulator: Accumulator) -> Place {
    match accumulator {
        Accumulator::Block(index) => Place::BlockSum(index),
        Accumulator::Head => Place::HeadSum,
        Accumulator::Embed => Place::EmbedSum,
    }
}

/// Slots by number: tiles' own, then the shared ones far above.
fn slot_place(slot: GradientSlot) -> Place {
    Place::Slot(match slot {
        GradientSlot::Tile(layer) => u32::from(layer),
        GradientSlot::Block(index) => 1_000_000 + index,
        GradientSlot::Wide => 2_000_000,
    })
}

/// Everything that must have ended before `target` can start.
pub(crate) fn ancestors(schedule: &Schedule, target: At) -> BTreeSet<At> {
    let lanes: Vec<Vec<usize>> = Lane::ALL
        .iter()
        .map(|lane| schedule.lane(*lane).collect())
        .collect();
    let mut found = BTreeSet::new();
    let mut left = vec![target];
    while let Some((step, index)) = left.pop() {
        let lane = &lanes[schedule.actions[index].lane as usize];
        let position = lane
            .iter()
            .position(|other| *other == index)
            .expect("its lane");
        let mut before = Vec::new();
        match position {
            0 if step > 0 => before.push((step - 1, lane[lane.len() - 1])),
            0 => {}
            position => before.push((step, lane[position - 1])),
        }
        for after in &schedule.actions[index].after {
            if let Some(step) = step.checked_sub(u64::from(after.previous)) {
                before.push((step, after.action as usize));
            }
        }
        left.extend(before.into_iter().filter(|at| found.insert(*at)));
    }
    found
}
