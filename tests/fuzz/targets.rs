//! What is fuzzed: every parser of bytes that come from elsewhere, each as a function of bytes that
//! must return. `tests/fuzz_corpus.rs` runs them with a mutator of its own, `fuzz_targets` under
//! libFuzzer.
//!
//! Structures with a checksum are tried as they are and with the checksum put right: it guards
//! against accidents, not against a writer of bad files.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use terrace::config::{DataFormat, RunConfig};
use terrace::data::{formats, tokenize::TextTokenizer};
use terrace::hf::WeightSource;
use terrace::hf::safetensors::SafetensorsFile;
use terrace::host::HostArena;
use terrace::model::ModelSpec;
use terrace::store::codec::Coder;
use terrace::store::format::{self, Manifest, Stored, Superblock, manifest, superblock};
use terrace::store::sim::{Faults, SimDisk};
use terrace::store::{CheckpointStore, Spec, StoredSection, checksum};
use terrace::tile::{Section, TileId};

/// A target's name and function.
pub(crate) type Target = (&'static str, fn(&[u8]));

/// All targets.
pub(crate) const TARGETS: [Target; 10] = [
    ("superblock", superblock),
    ("manifest", manifest),
    ("store", store),
    ("safetensors", safetensors),
    ("index", index),
    ("config", config),
    ("tokenizer", tokenizer),
    ("rows", rows),
    ("run", run),
    ("zstd", zstd),
];

/// Inputs that are right, of a target that has none in the corpus: what a writer writes.
pub(crate) fn seeds(target: &str) -> Vec<Vec<u8>> {
    match target {
        "superblock" => (0..4).map(|copy| SMALL.superblock.encode(copy)).collect(),
        "manifest" => vec![SMALL.manifest.clone()],
        // No change, a bit of a superblock, a page of a manifest.
        "store" => vec![vec![], vec![0, 80, 1], vec![4, 48, 9, 5, 48, 9]],
        "safetensors" => {
            let header = br#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend_from_slice(header);
            bytes.extend([0; 32]);
            vec![bytes, vec![2, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']]
        }
        "zstd" => {
            let mut slab = vec![0; FRAME_BYTES_MAX];
            let payload = 12_000;
            let values = (0..payload).map(|index| (index / 7) as u8);
            let values: Vec<u8> = values.collect();
            slab[..payload].copy_from_slice(&values);
            let coded = CODER.with_borrow_mut(|coder| coder.encode(&mut slab, payload, 4, 1));
            let Ok(Stored::Zstd { bytes }) = coded else {
                return Vec::new();
            };
            let mut input = vec![3];
            input.extend_from_slice(&(payload as u16 - 1).to_le_bytes());
            input.extend_from_slice(&slab[..bytes as usize]);
            vec![input]
        }
        _ => Vec::new(),
    }
}

/// Most bytes of a frame and of what it holds, here.
const FRAME_BYTES_MAX: usize = 1 << 17;

thread_local! {
    static CODER: RefCell<Coder> = RefCell::new(Coder::new().expect("a coder's memory"));
}

/// The bytes of an element, the length of the payload, then a frame.
fn zstd(data: &[u8]) {
    let [element, low, high, frame @ ..] = data else {
        return;
    };
    let payload = 1 + usize::from(u16::from_le_bytes([*low, *high]));
    let stored = frame.len().min(FRAME_BYTES_MAX);
    let mut slab = vec![0xee; FRAME_BYTES_MAX];
    slab[..stored].copy_from_slice(&frame[..stored]);
    let element_bytes = 1 + usize::from(element % 4);
    for payload in [payload, payload - 1] {
        let decoded = CODER.with_borrow_mut(|coder| {
            let payload = payload.max(1);
            coder.decode(&mut slab.clone(), stored, payload, element_bytes)
        });
        if let Err(error) = decoded {
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "{error}");
        }
    }
}

/// A store with two commits, and its structures.
struct Small {
    disk: SimDisk,
    spec: Spec,
    superblock: Superblock,
    manifest: Vec<u8>,
}

static SMALL: LazyLock<Small> = LazyLock::new(|| {
    let section = |layer, elements| StoredSection {
        tile: TileId { layer, part: 0 },
        section: Section::Weight,
        elements,
        element_bytes: 2,
    };
    let spec = Spec {
        model_hash: 1,
        keep: 2,
        sections: vec![section(0, 65), section(1, 3000)],
        engine: None,
        memory: Vec::new(),
    };
    let bytes = spec.file_bytes().expect("a small store");
    let disk = SimDisk::new(bytes, Faults::default());
    let made = CheckpointStore::format_disk(Box::new(disk.clone()), &spec, 7);
    let mut store = made.expect("a simulated disk without faults");
    for generation in 1..=2 {
        let mut commit = store.begin_commit(generation).expect("a newer generation");
        for section in &spec.sections {
            let key = section.keys().next().expect("one extent");
            let payload = vec![generation as u8; commit.payload_bytes(key)];
            commit.write(key, &payload).expect("no faults");
        }
        commit.finish(b"{}").expect("no faults");
    }
    let superblock = store.superblock().clone();
    let manifest_bytes = superblock.regions.iter().find_map(|region| match region {
        format::Region::Free => None,
        format::Region::Committed { manifest_bytes, .. } => Some(*manifest_bytes as usize),
    });
    let offset = superblock.geometry.manifest_offset(0, 0);
    let manifest = disk.peek(offset, manifest_bytes.expect("two commits"));
    Small {
        disk,
        spec,
        superblock,
        manifest,
    }
});

fn put_sum(bytes: &mut [u8], field: format::Field, sum: u128) {
    bytes[field.start..field.start + 16].copy_from_slice(&sum.to_le_bytes());
}

fn superblock(data: &[u8]) {
    let mut page = data.to_vec();
    page.resize(superblock::BYTES, 0);
    let copy = usize::from(page[superblock::COPY.start] % 4);
    for _ in 0..2 {
        if let Ok(Ok(found)) = Superblock::decode(&page, copy) {
            // What is accepted means the same when written again.
            let again = found.encode(copy);
            assert_eq!(Superblock::decode(&again, copy), Ok(Ok(found)));
        }
        let sum = checksum(&page[..superblock::CHECKSUM.start]);
        put_sum(&mut page, superblock::CHECKSUM, sum);
    }
}

fn manifest(data: &[u8]) {
    let geometry = &SMALL.superblock.geometry;
    let mut bytes = data.to_vec();
    for _ in 0..2 {
        if let Ok(found) = Manifest::decode(&bytes, geometry) {
            assert_eq!(
                found.encode(geometry),
                bytes,
                "one encoding of each manifest"
            );
        }
        if bytes.len() < manifest::BYTES {
            return;
        }
        let sum = format::manifest_checksum(&bytes);
        put_sum(&mut bytes, manifest::CHECKSUM, sum);
    }
}

/// Bytes of a store changed, three bytes a change: a structure, a place in it, a value. Then its
/// checksums put right, or not, and everything read.
fn store(data: &[u8]) {
    let disk = SMALL.disk.after_exit(Faults::default());
    let geometry = SMALL.superblock.geometry;
    let mut touched = Vec::new();
    for change in data.chunks_exact(3).take(64) {
        let (which, place, value) = (change[0], usize::from(change[1]), change[2]);
        let offset = match which % 12 {
            copy @ 0..4 => format::superblock_offset(usize::from(copy)),
            copy @ 4..10 => {
                geometry.manifest_offset(usize::from(copy - 4) / 2, u64::from(copy % 2))
            }
            region => geometry.extents_offset(usize::from(region - 10)),
        };
        // Sixteen bytes a step over the regions of a superblock, then byte by byte.
        let place = place * usize::from(1 + which / 128 * 15);
        disk.overwrite(offset + place as u64, &[value]);
        touched.push((which % 12, offset, which & 64 != 0));
    }
    for (which, offset, right) in touched {
        match which {
            0..4 if right => {
                let mut page = disk.peek(offset, superblock::BYTES);
                let sum = checksum(&page[..superblock::CHECKSUM.start]);
                put_sum(&mut page, superblock::CHECKSUM, sum);
                disk.overwrite(offset, &page);
            }
            4..10 if right => {
                let mut bytes = disk.peek(offset, SMALL.manifest.len());
                let sum = format::manifest_checksum(&bytes);
                put_sum(&mut bytes, manifest::CHECKSUM, sum);
                disk.overwrite(offset, &bytes);
            }
            _ => {}
        }
    }
    let opened =
        CheckpointStore::open_disk(Box::new(disk.clone()), disk.bytes(), Some(&SMALL.spec));
    let Ok(store) = opened else {
        return;
    };
    let Ok(mut cutter) = HostArena::take(1 << 16) else {
        return;
    };
    let ring = cutter.cut_ring(1, 1 << 16);
    let Some(table) = store.table().cloned() else {
        return;
    };
    for generation in store.generations() {
        for key in (0..table.count()).map(|index| table.key(index)) {
            // Only what a fixed checksum cannot hide: an extent is read whole or refused.
            if let Ok(slab) = store.read(generation, key, ring.take()) {
                let bytes = table.slot_bytes(table.index(key).expect("of the table"));
                let sum = store.extent_checksum(generation, key);
                assert_eq!(sum.ok(), Some(checksum(&slab.as_slice()[..bytes])));
            }
        }
    }
}

/// A directory of this thread's own, in memory where the system has such a place.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Directory {
        let root = match Path::new("/dev/shm").is_dir() {
            true => PathBuf::from("/dev/shm"),
            false => std::env::temp_dir(),
        };
        let thread = std::thread::current().id();
        let name = format!("terrace-fuzz-{}-{thread:?}", std::process::id());
        let path = root.join(name.replace(['(', ')'], ""));
        std::fs::create_dir_all(&path).expect("a directory for inputs");
        Directory(path)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.join(name), bytes).expect("an input is written");
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

thread_local! {
    static DIRECTORY: Directory = Directory::new();
}

fn safetensors(data: &[u8]) {
    DIRECTORY.with(|directory| {
        directory.write("model.safetensors", data);
        if let Ok(file) = SafetensorsFile::open(&directory.0, "model.safetensors") {
            for name in file.names() {
                let entry = file.tensor(name).expect("a name of the file");
                assert!(entry.offset + entry.bytes <= data.len() as u64, "{entry:?}");
            }
        }
    });
}

const MODEL: &str = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":97,
"hidden_size":32,"intermediate_size":48,"num_hidden_layers":1,"num_attention_heads":4,
"num_key_value_heads":2,"head_dim":8,"rms_norm_eps":1e-05,"hidden_act":"silu",
"max_position_embeddings":128,"tie_word_embeddings":false}"#;

fn index(data: &[u8]) {
    let spec = ModelSpec::from_config_json(MODEL, "config.json").expect("a model");
    DIRECTORY.with(|directory| {
        std::fs::remove_file(directory.0.join("model.safetensors")).ok();
        for name in ["a.safetensors", "b.safetensors"] {
            directory.write(name, &seeds("safetensors")[1]);
        }
        directory.write("model.safetensors.index.json", data);
        WeightSource::open(&directory.0, &spec).ok();
    });
}

fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(spec) = ModelSpec::from_config_json(text, "config.json") {
        // Bounded by the parser: neither overflows.
        assert!(spec.parameters() > 0);
        for layer in [0, 1, spec.layer_count() - 1] {
            assert!(spec.tile_layout(layer).elements > 0);
        }
    }
}

fn tokenizer(data: &[u8]) {
    if let Ok(tokenizer) = TextTokenizer::from_bytes(data, b"{}")
        && let Ok(ids) = tokenizer.encode("a text, 12 words — naïve\n", true)
    {
        tokenizer.decode(&ids, false).ok();
    }
}

fn rows(data: &[u8]) {
    let Ok(row) = serde_json::from_slice(data) else {
        return;
    };
    let all = [
        DataFormat::Messages,
        DataFormat::Sharegpt,
        DataFormat::Alpaca,
        DataFormat::Prompt,
        DataFormat::Text,
        DataFormat::Tokens,
    ];
    for format in all.into_iter().chain(formats::detect(&row).ok()) {
        for calls_as_text in [false, true] {
            formats::read(&row, format, calls_as_text).ok();
        }
    }
}

fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(config) = RunConfig::parse(text, "run.toml", &[]) {
        // What is accepted means the same when written again.
        let again = RunConfig::parse(&config.to_toml(), "run.toml", &[]);
        let again = again.expect("what was written is right");
        assert_eq!(again.identity_hash(), config.identity_hash());
    }
}

/// Calls a target by its name.
///
/// # Panics
/// If there is none, or the target finds something.
pub(crate) fn call(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|(known, _)| *known == name);
    target.expect("a target's name").1(data);
}
