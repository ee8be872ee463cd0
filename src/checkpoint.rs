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

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::config::RunConfig;
use crate::config::parse::Class;
use crate::data::{Cursor, Dataset};
use crate::error::{Error, Result};
use crate::host::Ring;
use crate::model::ModelSpec;
use crate::step::Held;
use crate::store::{CheckpointStore, Phase, Spec, StoredSection};
use crate::tile::{Precision, Section};
use crate::transfer::Tiers;
use crate::transfer::fill::Fill;

/// Where a run stands at a commit.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Steps done.
    pub step: u64,
    /// Tokens done.
    pub tokens: u64,
    /// The next sequence.
    pub cursor: Cursor,
    /// The run.toml, complete.
    pub run: String,
    /// Checksum of the training data.
    pub data: String,
    /// The model directory's config.json.
    pub model: Value,
    /// Bytes written to drives so far, of all processes of the run.
    pub written: u64,
    /// Device and libraries that computed it (see [`Device::identity`](crate::device::Device)).
    pub device: String,
    /// Matrix products with their algorithms, where a library chose them.
    pub products: BTreeMap<String, String>,
}

impl Progress {
    /// The progress of a run that has trained nothing yet.
    pub fn new(config: &RunConfig, dataset: &Dataset, model: &Value, cursor: Cursor) -> Progress {
        Progress {
            step: 0,
            tokens: 0,
            cursor,
            run: config.to_toml(),
            data: format!("{:032x}", dataset.fingerprint()),
            model: model.clone(),
            written: 0,
            device: String::new(),
            products: BTreeMap::new(),
        }
    }

    /// Takes over what a commit counted; a warning where another device computed it.
    pub fn goes_on_from(&mut self, found: &Progress) -> Option<String> {
        (self.step, self.tokens, self.written) = (found.step, found.tokens, found.written);
        self.products.clone_from(&found.products);
        let differs = !found.device.is_empty() && found.device != self.device;
        differs.then(|| {
            format!(
                "warning: the commit was computed on {}, this run computes on {}: the last bits \
                 of its numbers may differ",
                found.device, self.device
            )
        })
    }

    fn to_json(&self) -> Value {
        json!({
            "terrace": env!("CARGO_PKG_VERSION"),
            "step": self.step,
            "tokens": self.tokens,
            "cursor": self.cursor,
            "run": self.run,
            "data": self.data,
            "model": self.model,
            "written": self.written,
            "device": self.device,
            "products": self.products,
        })
    }

    pub(crate) fn from_json(bytes: &[u8], path: &Path) -> Result<Progress> {
        let damaged = |got: String| Error::Damaged {
            path: path.to_path_buf(),
            what: "metadata of a commit".to_string(),
            offset: 0,
            expected: "step, tokens, cursor, run, data and model".to_string(),
            got,
            remedy: "resume from another commit with --resume=STEP".to_string(),
        };
        let value: Value = serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
        let text = |key: &str| value[key].as_str().map(str::to_string);
        let read = || {
            Some(Progress {
                step: value["step"].as_u64()?,
                tokens: value["tokens"].as_u64()?,
                cursor: serde_json::from_value(value["cursor"].clone()).ok()?,
                run: text("run")?,
                data: text("data")?,
                model: value["model"].clone(),
                // Commits of versions that did not tell have none.
                written: value["written"].as_u64().unwrap_or(0),
                device: text("device").unwrap_or_default(),
                products: serde_json::from_value(value["products"].clone()).unwrap_or_default(),
            })
        };
        read().ok_or_else(|| damaged("another set of keys".to_string()))
    }

    /// What differs in the run that goes on from here, `now` being its own progress, as sentences;
    /// an error for what may not, unless `allowed`. Model and data are held by their contents: they
    /// may have moved.
    pub fn changes(
        &self,
        config: &RunConfig,
        now: &Progress,
        allowed: bool,
    ) -> Result<Vec<String>> {
        let old = RunConfig::parse(&self.run, "the commit's run.toml", &[])?;
        let mut sentences = Vec::new();
        let refused = |place: &str, expected: &str, got: &str| {
            Error::input(
                "resume",
                place,
                expected,
                got,
                "change it back, or pass --resume-changed to go on with another run",
            )
        };
        // As it is read back from a commit.
        let model: Option<Value> = serde_json::from_str(&now.model.to_string()).ok();
        let same_model = model.as_ref() == Some(&self.model);
        for difference in config.resume_differences(&old) {
            let (key, old, new) = (difference.key, difference.old, difference.new);
            let moved = match key.as_ref() {
                "model.path" => same_model,
                "data.train" => now.data == self.data,
                _ => false,
            };
            match difference.class {
                Class::Free => {}
                Class::Forbidden if !allowed && !moved => return Err(refused(&key, &old, &new)),
                _ => sentences.push(format!("resumed with {key} = {new}, was {old}")),
            }
        }
        let contents = [
            ("the model's config.json", "model", same_model),
            (
                "training data (its tokens' checksum)",
                "training data",
                now.data == self.data,
            ),
        ];
        for (place, name, same) in contents {
            if same {
                continue;
            }
            if !allowed {
                let (expected, got) = match name {
                    "model" => ("what the commit holds", "another"),
                    _ => (self.data.as_str(), now.data.as_str()),
                };
                return Err(refused(place, expected, got));
            }
            sentences.push(format!("resumed with another {name}"));
        }
        Ok(sentences)
    }
}

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
            keep: config.checkpoint.keep,
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
        let mut store = CheckpointStore::open_or_create(&directory, &store_spec)?;
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
        Ok(self
            .all()?
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
        held: Held,
        progress: &Progress,
        synced: impl FnOnce(),
    ) -> Result<Written> {
        let before = self.store.counters().write;
        let metadata = progress.to_json().to_string();
        commit_state(
            &mut self.store,
            held,
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
        let (generation, progress) = self.find(step)?;
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

    fn find(&self, step: Option<u64>) -> Result<(u64, Progress)> {
        let all = self.all()?;
        let steps: Vec<String> = all.iter().map(|(_, p)| p.step.to_string()).collect();
        let found = match step {
            None => all.into_iter().next_back(),
            Some(step) => all
                .into_iter()
                .rev()
                .find(|(_, progress)| progress.step == step),
        };
        found.ok_or_else(|| {
            Error::input(
                "resume",
                self.directory.display().to_string(),
                format!("one of the steps {}", steps.join(", ")),
                step.map_or("none".to_string(), |step| step.to_string()),
                "name a step that is committed",
            )
        })
    }

    fn all(&self) -> Result<Vec<(u64, Progress)>> {
        let read = |generation: u64| {
            let metadata = self.store.metadata(generation)?;
            Ok((
                generation,
                Progress::from_json(&metadata, self.store.path())?,
            ))
        };
        self.store.generations().into_iter().map(read).collect()
    }
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

/// The newest commit of a directory, or that of `step`, opened to read weights from.
pub struct CommittedWeights {
    store: CheckpointStore,
    generation: u64,
    ring: Ring,
    /// Where the run stood.
    pub progress: Progress,
}

impl CommittedWeights {
    /// Opens a checkpoint directory.
    pub fn open(directory: &Path, step: Option<u64>) -> Result<CommittedWeights> {
        let store = CheckpointStore::open_existing(directory)?;
        let checkpoints = Checkpoints {
            store,
            directory: directory.to_path_buf(),
            made_bytes: 0,
        };
        let (generation, progress) = checkpoints.find(step)?;
        let ring = own_ring(crate::tile::EXTENT_BYTES_MAX)?;
        Ok(CommittedWeights {
            store: checkpoints.store,
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

    #[test]
    fn progress_comes_back_from_its_metadata_and_older_ones_lack_what_they_did_not_tell() {
        let products = BTreeMap::from([("8 x 8 x 8 NN".to_string(), "1 2 3".to_string())]);
        let progress = Progress {
            step: 3,
            tokens: 5,
            cursor: serde_json::from_value(json!({"epoch": 1, "sequence": 2})).unwrap_or_default(),
            run: "run".to_string(),
            data: "data".to_string(),
            model: json!({"a": 1}),
            written: 7,
            device: "a card".to_string(),
            products,
        };
        let read = |value: Value| Progress::from_json(value.to_string().as_bytes(), "x".as_ref());
        assert_eq!(read(progress.to_json()).ok(), Some(progress.clone()));
        let mut older = progress.to_json();
        let keys = older.as_object_mut().expect("an object");
        for key in ["written", "device", "products"] {
            keys.shift_remove(key);
        }
        let read = read(older).expect("older metadata are read");
        assert_eq!((read.written, read.device.as_str()), (0, ""));
        assert_eq!(read.products, BTreeMap::new());
        assert_eq!(read.step, progress.step);
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
