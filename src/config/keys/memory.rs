//! Keys of `[memory]`.

use super::{Key, key};
use crate::config::written::{named, number, quoted_path, store_list};
use crate::config::{IoEngine, Recompute, SpillZstd};

const RECOMPUTES: &[(&str, Recompute)] = &[
    ("auto", Recompute::Auto),
    ("all", Recompute::All),
    ("none", Recompute::None),
];
const SPILL_ZSTDS: &[(&str, SpillZstd)] = &[
    ("auto", SpillZstd::Auto),
    ("on", SpillZstd::On),
    ("off", SpillZstd::Off),
];
const IO_ENGINES: &[(&str, Option<IoEngine>)] = &[
    ("auto", None),
    ("io_uring", Some(IoEngine::Uring)),
    ("pread", Some(IoEngine::Pread)),
];

pub(super) const KEYS: &[Key] = &[
    key!(
        memory.device,
        Free,
        "\"auto\"",
        "",
        "Device memory to use: \"24GiB\", \"141 GB\", or \"auto\".",
        |g| g.size()?,
        |v| Some(format!("\"{v}\""))
    ),
    key!(
        memory.host,
        Free,
        "\"auto\"",
        "",
        "Host memory to use; \"auto\" is what is free, less a reserve.",
        |g| g.size()?,
        |v| Some(format!("\"{v}\""))
    ),
    key!(
        memory.store,
        Free,
        "[]",
        "",
        "Where to spill what host memory cannot hold: a path, or a list as\n\
         [{ path = \"/nvme/scratch\", size = \"512GiB\" }]. With its rates in each entry\n\
         (read = \"3GB/s\", write = \"2GB/s\") bytes are spread by those; without, by size.",
        |g| g.store()?,
        |v| store_list(v)
    ),
    key!(
        memory.buffers,
        Free,
        "2",
        "",
        "Device buffers of block weights, 1 to 8.",
        |g| g.integer(1, 8)?,
        |v| Some(v.to_string())
    ),
    key!(
        memory.slabs,
        Free,
        "16",
        "",
        "Host slabs of 4 MiB in flight to and from the store, and states of a card, 4 to 256.",
        |g| g.integer(4, 256)?,
        |v| Some(v.to_string())
    ),
    key!(
        memory.recompute,
        Free,
        "\"auto\"",
        "",
        "Activations: \"auto\" keeps what fits, \"all\" recomputes every block, \
         \"none\" keeps all.",
        |g| g.choice(RECOMPUTES)?,
        |v| named(RECOMPUTES, v)
    ),
    key!(
        memory.zstd,
        Free,
        "\"auto\"",
        "",
        "Compression of spilled moments, lossless: \"on\", \"off\", or \"auto\": where the plan\n\
         predicts a shorter step by it, that is with a slow disk and cores to spare.",
        |g| g.choice(SPILL_ZSTDS)?,
        |v| named(SPILL_ZSTDS, v)
    ),
    key!(
        memory.io_engine,
        Free,
        "\"auto\"",
        "",
        "Engine of the store: \"auto\", \"io_uring\" or \"pread\".",
        |g| g.choice(IO_ENGINES)?,
        |v| named(IO_ENGINES, v)
    ),
    key!(
        memory.drive_tbw,
        Free,
        "",
        "# 600",
        "Terabytes written (TBW) that the drive of memory.store and checkpoint.dir is rated for,\n\
         the sum of several: metrics and plan then show the share of its life.",
        |g| Some(g.float(|x| x > 0.0, "a number of terabytes above 0")?),
        |v| v.and_then(number)
    ),
    key!(
        memory.profile,
        Free,
        "",
        "# \"profile.toml\"",
        "Rates of this machine, measured once by `terrace-bench profile`; without it, a moment's\n\
         measurement and a common drive.",
        |g| Some(g.path()?),
        |v| v.as_deref().map(quoted_path)
    ),
    key!(
        memory.io_timeout,
        Free,
        "60",
        "",
        "Seconds after which a read or write of the store that has not come back is said, 0 to\n\
         86400; 0 is never. It ends nothing.",
        |g| g.integer(0, 86400)?,
        |v| Some(v.to_string())
    ),
];
