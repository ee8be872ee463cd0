//! Checkpoints of a run: its whole state in a durable store, and what it needs to go on from there.
//!
//! - Every extent of every section is committed, wherever it lives, then the metadata: step, data
//!   cursor, tokens, the run.toml, the model's config.json.
//! - A commit is made of a state that `step` holds: training goes on, and each tile is released as
//!   soon as it is copied.
//! - Restoring puts the bytes back where the plan of the resumed run has them; the plan may differ.
//! - What may not change between the two runs is refused, unless asked for by name.
//!
//! The bytes on disk are `store::checkpoint`'s.

mod progress;

pub use progress::{Best, Evaluations, Norms, Progress};

use std::path::{Path, PathBuf};

use crate::config::RunConfig;
use crate::error::{Error, Result};
use crate::host::Ring;
use crate::model::ModelSpec;
use crate::step::Held;
use crate::store::{CheckpointStore, Phase, Reader, Spec, StoredSection};
use crate::tile::{Precision, Section};
use crate::transfer::Tiers;
use crate::transfer::fill::Fill;

/// Names a model and its precision: a commit of another one is refused.
pub fn model_hash(spec: &ModelSpec, precision: Precision) -> u128 {
    let mut names = String::new();
    for layer in 0..spec.layer_count() {
        for tensor in spec.layer_tensors(layer) {
            names.push_str(&format!("{} {:?}\n", tensor.name, tensor.shape));
        }
    }
    names.push_str(&format!("{:?} {precision:?}", spec.family));
    twox_hash::XxHash3_128::oneshot(names.as_bytes())
}

/// Where a configuration's commits go.
pub fn checkpoint_dir(config: &RunConfig) -> PathBuf {
    config
        .checkpoint
        .dir
        .clone()
        .unwrap_or_else(|| config.log.dir.join("checkpoint"))
}

/// The checkpoint directory that a person means: the one named, or that of the run named.
pub fn checkpoint_at(directory: &Path) -> PathBuf {
    let of_run = directory.join("checkpoint");
    match CheckpointStore::exists(&of_run) && !CheckpointStore::exists(directory) {
        true => of_run,
        false => directory.to_path_buf(),
    }
}

/// The model's directory of a run whose commits are in `directory`. Where a relative `model.path`
/// is not to be found, it is looked for from where the run's own `checkpoint.dir` was meant.
pub fn model_of_commits(config: &RunConfig, directory: &Path) -> Option<PathBuf> {
    let path = config.model.path.clone()?;
    let meant = checkpoint_dir(config);
    let whole = directory.canonicalize().ok();
    let from_there = || {
        let meant = meant.strip_prefix(".").unwrap_or(&meant);
        let whole = whole.filter(|whole| meant.is_relative() && whole.ends_with(meant))?;
        let base = whole.ancestors().nth(meant.components().count())?;
        Some(base.join(&path)).filter(|path| path.is_dir())
    };
    match path.is_dir() || path.is_absolute() {
        true => Some(path),
        false => from_there().or(Some(path)),
    }
}

/// What a commit wrote.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Written {
    /// Bytes, extents with their padding, manifests and superblocks.
    pub bytes: u64,
    /// Seconds in which at least one of its writes was under way.
    pub busy_seconds: f64,
}

/// A run's checkpoint store.
pub struct Checkpoints {
    store: CheckpointStore,
    directory: PathBuf,
    /// Bytes of the file, if this process made it.
    made_bytes: u64,
    /// The commit of the best evaluation stays beside the last ones.
    keeps_best: bool,
}

/// Which commit of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The newest.
    Newest,
    /// That of a step.
    Step(u64),
    /// That of the evaluation with the lowest loss.
    Best,
}

impl Checkpoints {
    /// Opens the store of a run, or makes it. A `fresh` run refuses a store that has commits.
    pub fn open(
        config: &RunConfig,
        spec: &ModelSpec,
        tiers: &Tiers,
        fresh: bool,
    ) -> Result<Checkpoints> {
        let directory = checkpoint_dir(config);
        let store_spec = Spec {
            model_hash: model_hash(spec, config.precision()),
            keep: config.checkpoint.held(),
            sections: sections_of(tiers),
            engine: config.memory.io_engine,
            memory: tiers.commit_ring.iter().map(Ring::span).collect(),
        };
        let no_commit = |directory: &Path| {
            Error::input(
                "resume",
                directory.display().to_string(),
                "a commit",
                "none",
                "start without --resume, or name its checkpoint.dir or log.dir",
            )
        };
        // Nothing is made where there is nothing to resume from.
        if !fresh && !CheckpointStore::exists(&directory) {
            return Err(no_commit(&directory));
        }
        let made = !CheckpointStore::exists(&directory);
        let mut store = CheckpointStore::open_or_create(&directory, &store_spec).map_err(
            |error| match error {
                Error::Input { .. } if !fresh => of_another_format(&directory, config, error),
                error => error,
            },
        )?;
        store.set_zstd(config.checkpoint.zstd)?;
        store.set_io_timeout(
            std::time::Duration::from_secs(config.memory.io_timeout),
            None,
        );
        let checkpoints = Checkpoints {
            store,
            directory,
            made_bytes: match made {
                true => store_spec.file_bytes().unwrap_or(0),
                false => 0,
            },
            keeps_best: config.checkpoint.keep_best,
        };
        let steps = checkpoints.steps()?;
        match (steps.last(), fresh) {
            (Some(step), true) => Err(Error::input(
                "checkpoint",
                checkpoints.directory.display().to_string(),
                "an empty checkpoint.dir for a new run",
                format!("commits up to step {step}"),
                "pass --resume to go on, or choose another checkpoint.dir or log.dir",
            )),
            (None, false) => Err(no_commit(&checkpoints.directory)),
            _ => Ok(checkpoints),
        }
    }

    /// What a person should know of the store.
    pub fn sentences(&self) -> Vec<String> {
        self.store.sentences().to_vec()
    }

    /// The store's directory.
    pub fn path(&self) -> &Path {
        &self.directory
    }

    /// Bytes that were written to make the file; 0 if it was there.
    pub fn made_bytes(&self) -> u64 {
        self.made_bytes
    }

    /// Calls `hook` at each phase of every later commit, for tests that end the process there.
    pub fn set_phase_hook(&mut self, hook: Box<dyn Fn(Phase) + Send>) {
        self.store.set_phase_hook(hook);
    }

    /// Steps that are committed, oldest first.
    pub fn steps(&self) -> Result<Vec<u64>> {
        Ok(all(&self.store)?
            .into_iter()
            .map(|(_, progress)| progress.step)
            .collect())
    }

    /// Commits the state that is held, tile by tile in the order in which the next step wants them,
    /// and releases each as soon as it is copied. `synced` is called when all extents are written,
    /// before anything refers to them. What was written, and how fast.
    ///
    /// # Errors
    /// The first failed write or flush, after which only the commits before are there;
    /// [`Error::NonFinite`] for a weight that is not a number.
    pub fn commit(
        &mut self,
        state: Held,
        progress: &Progress,
        synced: impl FnOnce(),
    ) -> Result<Written> {
        // The commit of the best evaluation stays, if there is room for it beside the others.
        let best = progress.evaluations.best.filter(|_| self.keeps_best);
        let best = best.filter(|best| best.step != progress.step);
        let held = |best: &Best| Ok::<_, Error>(find_best(&all(&self.store)?, *best));
        let pinned = best.as_ref().map(held).transpose()?.flatten();
        self.store.set_pinned(pinned);
        let before = self.store.counters().write;
        let metadata = progress.to_json().to_string();
        commit_state(
            &mut self.store,
            state,
            progress.step,
            metadata.as_bytes(),
            synced,
        )?;
        let after = self.store.counters().write;
        Ok(Written {
            bytes: after.bytes - before.bytes,
            busy_seconds: (after.busy_ns - before.busy_ns) as f64 / 1e9,
        })
    }

    /// Puts the state of a commit into the tiers: the newest, or that of `step`.
    pub fn restore(&self, tiers: &Tiers, step: Option<u64>) -> Result<Progress> {
        let choice = step.map_or(Choice::Newest, Choice::Step);
        let (generation, progress) = find(&self.store, "resume", &self.directory, choice)?;
        let mut fill = Fill::new(tiers);
        let keys: Vec<_> = tiers.extents().collect();
        // The store reads into a ring of its own, so that scratch writes have theirs.
        let ring = own_ring(tiers.ring.slab_bytes())?;
        let read = self.store.read_all(generation, keys, &ring, |key, slab| {
            fill.put(key, |bytes| {
                let length = bytes.len();
                bytes.copy_from_slice(&slab.as_slice::<u8>()[..length]);
            })
        });
        read.map_err(|error| self.damaged_commit(error, progress.step))?;
        fill.finish()?;
        Ok(progress)
    }

    /// An extent of a commit that is not what was committed, with the commits that are left.
    fn damaged_commit(&self, error: Error, damaged: u64) -> Error {
        let Error::ExtentChecksum {
            path,
            tile,
            extent,
            offset,
            expected,
            got,
        } = error
        else {
            return error;
        };
        let steps = self.steps().unwrap_or_default().into_iter();
        let others: Vec<String> = steps
            .filter(|step| *step != damaged)
            .map(|step| format!("--resume={step}"))
            .collect();
        let remedy = match others.is_empty() {
            true => "restore the file from a copy: it holds no other commit".to_string(),
            false => format!("check the drive, then try {}", others.join(" or ")),
        };
        Error::Damaged {
            path,
            what: format!("commit of step {damaged}: checksum of {tile}, extent {extent}"),
            offset,
            expected: format!("{expected:032x}"),
            got: format!("{got:032x}"),
            remedy,
        }
    }
}

/// The refusal of commits whose sections have another format than the run's: that is a key of
/// run.toml, which says more than that the store is another's. `error` if they have this one.
fn of_another_format(directory: &Path, config: &RunConfig, error: Error) -> Error {
    let found = || {
        let store = CheckpointStore::open_read_only(directory).ok()?;
        let (_, newest) = all(&store).ok()?.pop()?;
        let old = RunConfig::parse(&newest.run, "the commit's run.toml", &[]).ok()?;
        let mut differences = config.resume_differences(&old).into_iter();
        let is_format = |key: &str| ["model.precision", "optimizer.moments"].contains(&key);
        differences.find(|difference| is_format(&difference.key))
    };
    let Some(found) = found() else {
        return error;
    };
    Error::input(
        "resume",
        found.key,
        found.old,
        found.new,
        "change it back: a commit's format stays, also with --resume-changed; to go on in another, \
         export the commit and train that with another log.dir",
    )
}

/// The commits of a store, oldest first.
fn all(store: &Reader) -> Result<Vec<(u64, Progress)>> {
    let read = |generation: u64| {
        let metadata = store.metadata(generation)?;
        Ok((generation, Progress::from_json(&metadata, store.path())?))
    };
    store.generations().into_iter().map(read).collect()
}

/// The generation of a step; of several the last, which a run that went back made.
fn find_step(all: &[(u64, Progress)], step: u64) -> Option<u64> {
    let found = all.iter().rev().find(|(_, of)| of.step == step);
    found.map(|(generation, _)| *generation)
}

/// The generation of the best evaluation.
fn find_best(all: &[(u64, Progress)], best: Best) -> Option<u64> {
    let found = all.iter().rev().find(|(_, of)| of.is_of(best));
    found.map(|(generation, _)| *generation)
}

/// The commit that is asked for; `what` names who asks in errors.
fn find(
    store: &Reader,
    what: &'static str,
    directory: &Path,
    choice: Choice,
) -> Result<(u64, Progress)> {
    let mut all = all(store)?;
    let refused = |expected: &str, got: &str, remedy: &str| {
        let place = directory.display().to_string();
        Error::input(what, place, expected, got, remedy)
    };
    let Some((newest, progress)) = all.last() else {
        return Err(refused("a commit", "none", "wait for one, or train"));
    };
    let steps: Vec<String> = all.iter().map(|(_, p)| p.step.to_string()).collect();
    let steps = steps.join(", ");
    let generation = match choice {
        Choice::Newest => *newest,
        Choice::Step(step) => find_step(&all, step).ok_or_else(|| {
            let expected = format!("one of the steps {steps}");
            refused(
                &expected,
                &step.to_string(),
                "name a step that is committed",
            )
        })?,
        Choice::Best => {
            let best = progress.evaluations.best.ok_or_else(|| {
                let remedy = "set train.eval_every, or take the newest commit";
                refused("a commit of a run with evaluations", "none", remedy)
            })?;
            find_best(&all, best).ok_or_else(|| {
                let expected = format!("step {}, which has the lowest loss", best.step);
                let remedy = "set checkpoint.keep_best = true to keep it, or name one of these";
                refused(&expected, &format!("steps {steps}"), remedy)
            })?
        }
    };
    let found = all.iter().position(|(other, _)| *other == generation);
    Ok(all.swap_remove(found.expect("it is one of them")))
}

/// Writes the state that is held into a store as its next generation: what [`Checkpoints::commit`]
/// does, on any store.
pub fn commit_state(
    store: &mut CheckpointStore,
    held: Held,
    step: u64,
    metadata: &[u8],
    synced: impl FnOnce(),
) -> Result<()> {
    let generation = store.next_generation();
    let mut commit = store.begin_commit(generation)?;
    let layers: Vec<u16> = held.layers().collect();
    for layer in layers {
        let tiers = held.settled(layer)?;
        let precision = tiers.precision();
        for section in tiers.sections() {
            tiers.capture_section(layer, section, &mut |key, slab| {
                let bytes = &slab.as_slice::<u8>()[..commit.payload_bytes(key)];
                if section == Section::Weight && has_non_finite(bytes, precision) {
                    return Err(Error::NonFinite {
                        step,
                        what: format!("a weight of {}", key.tile),
                        value: "infinite or NaN".to_string(),
                        last_commit: "the commits before stay".to_string(),
                    });
                }
                commit.submit(key, slab)
            })?;
        }
        held.release(layer);
    }
    // Nothing waits for what is left: flushes, the manifest, the superblocks.
    drop(held);
    synced();
    commit.finish(metadata)
}

/// Whether little-endian weights hold an infinity or NaN: an update can carry a finite master
/// beyond bf16, and no loss has seen it yet.
fn has_non_finite(bytes: &[u8], precision: Precision) -> bool {
    // All ones in the exponent, which are the upper bits of the last two bytes of either format.
    let wide = precision == Precision::Fp32;
    // A piece at a time without a way out of it, which compiles to vector instructions.
    bytes.chunks(4096).any(|piece| {
        let halves = piece.as_chunks::<2>().0.iter().enumerate();
        halves.fold(false, |found, (index, half)| {
            let is_upper = !wide || index % 2 == 1;
            found | (is_upper & (u16::from_le_bytes(*half) & 0x7F80 == 0x7F80))
        })
    })
}

fn sections_of(tiers: &Tiers) -> Vec<StoredSection> {
    let precision = tiers.precision();
    let of = |layout| {
        let stored = move |section| StoredSection::of(layout, section, precision);
        tiers.sections().map(stored)
    };
    tiers.layouts().iter().flat_map(of).collect()
}

/// A few slabs outside the plan's arena, for reading a checkpoint.
fn own_ring(slab_bytes: u64) -> Result<Ring> {
    const SLABS: usize = 4;
    let mut cutter = crate::host::HostArena::take(SLABS as u64 * slab_bytes)?;
    Ok(cutter.cut_ring(SLABS, slab_bytes))
}

/// A commit of a directory, opened to read weights from, also beside a running training.
pub struct CommittedWeights {
    store: Reader,
    generation: u64,
    ring: Ring,
    /// Where the run stood.
    pub progress: Progress,
}

impl CommittedWeights {
    /// Opens a checkpoint directory.
    ///
    /// # Errors
    /// Those of [`CheckpointStore::open_read_only`]; [`Error::Input`] if it has no such commit.
    pub fn open(directory: &Path, choice: Choice) -> Result<CommittedWeights> {
        let store = CheckpointStore::open_read_only(directory)?;
        let (generation, progress) = find(&store, "checkpoint", directory, choice)?;
        let ring = own_ring(crate::tile::EXTENT_BYTES_MAX)?;
        Ok(CommittedWeights {
            store,
            generation,
            ring,
            progress,
        })
    }

    /// The fp32 masters of an element range of a tile, which may span extents.
    pub fn read_master(
        &self,
        layout: &crate::tile::TileLayout,
        elements: std::ops::Range<u64>,
        precision: Precision,
        out: &mut [f32],
    ) -> Result<()> {
        use crate::tile::{EXTENT_ELEMENTS, join_master};
        let mut at = elements.start;
        while at < elements.end {
            let extent = u32::try_from(at / EXTENT_ELEMENTS).expect("a tile has < 2^52 elements");
            let whole = layout.extent_elements(extent);
            let end = whole.end.min(elements.end);
            let inside = (at - whole.start) as usize..(end - whole.start) as usize;
            let target = &mut out[(at - elements.start) as usize..(end - elements.start) as usize];
            let read = |section| {
                let key = crate::store::ExtentKey {
                    tile: layout.id,
                    section,
                    extent,
                };
                self.store.read(self.generation, key, self.ring.take())
            };
            let weight = read(Section::Weight)?;
            match precision {
                Precision::Bf16 | Precision::Bf16Moments => {
                    let residual = read(Section::Residual)?;
                    let (weight, residual) = (weight.as_slice::<u16>(), residual.as_slice::<i16>());
                    let pairs = weight[inside.clone()].iter().zip(&residual[inside]);
                    for ((hi, lo), value) in pairs.zip(target) {
                        *value = join_master(*hi, *lo);
                    }
                }
                Precision::Fp32 => target.copy_from_slice(&weight.as_slice::<f32>()[inside]),
            }
            at = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Commits of steps 2, 4 and 6, then the run went back to 2 and only came to commit step 8.
    #[test]
    fn a_commit_that_was_left_behind_is_not_the_best_of_its_step() {
        let commit = |step: u64, best_step: u64, loss: f64| {
            let metadata = serde_json::json!({
                "step": step, "tokens": 0, "run": "", "data": "", "model": {},
                "cursor": serde_json::json!({"epoch": 0, "sequence": 0}),
                "evaluations": {
                    "best": {"step": best_step, "loss": loss}, "without_improvement": 0,
                },
            });
            let bytes = metadata.to_string();
            Progress::from_json(bytes.as_bytes(), Path::new("x")).expect("metadata")
        };
        let mut all = vec![
            (1, commit(2, 2, 3.0)),
            (2, commit(4, 4, 2.5)),
            (3, commit(6, 6, 2.0)),
            (4, commit(8, 6, 2.2)),
        ];
        let best = |step, loss| Best { step, loss };
        assert_eq!(find_best(&all, best(6, 2.2)), None);
        assert_eq!(find_best(&all, best(4, 2.5)), Some(2));
        all.insert(3, (7, commit(6, 6, 2.2)));
        assert_eq!(find_best(&all, best(6, 2.2)), Some(7));
    }

    #[test]
    fn infinities_and_nans_of_both_formats_are_seen_and_the_largest_numbers_are_not() {
        let bf16 = |value: u16| value.to_le_bytes();
        assert!(!has_non_finite(
            &[bf16(0x7F7F), bf16(0xFF7F), bf16(0)].concat(),
            Precision::Bf16
        ));
        assert!(has_non_finite(
            &[bf16(0), bf16(0x7F80)].concat(),
            Precision::Bf16
        ));
        assert!(has_non_finite(
            &[bf16(0), bf16(0xFFC1)].concat(),
            Precision::Bf16
        ));
        let all = [f32::MAX, f32::MIN, 0.0].map(f32::to_le_bytes).concat();
        assert!(!has_non_finite(&all, Precision::Fp32));
        let all = [1.0, f32::NEG_INFINITY].map(f32::to_le_bytes).concat();
        assert!(has_non_finite(&all, Precision::Fp32));
    }
}
