//! fio's words: every option of a job, once, with how it is read.
//!
//! - A job takes its options from the command line or from an INI file ([`super::job_file`]); both
//!   go through [`set`], so that both know the same words and refuse alike.
//! - What shapes the work has fio's defaults (`rw=read`, `bs=4k`, `iodepth=1`, 50 % reads). How it
//!   is done has the trainer's: its engines, direct I/O, registered buffers.
//! - Sizes are in powers of 1024 with or without `i` and `b`: `4k`, `4Ki` and `4KiB` are 4096.
//! - What fio knows and this does not is refused with the nearest word, never ignored.

use std::path::PathBuf;
use std::time::Duration;

use super::units::{
    engine, flag, number, pair, path, percent, plain_name, size, size_or_zero, time,
};
use crate::config::{IoEngine, distance};
use crate::error::{Error, Result, printable};
use crate::store::disk::DEPTH;

/// A job as its words describe it; [`super::load`] runs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Name, also of the file where none is given.
    pub name: String,
    /// Options as given, for reports.
    pub given: Vec<(String, String)>,
    /// The file.
    pub filename: Option<PathBuf>,
    /// Where the file is made.
    pub directory: Option<PathBuf>,
    /// Kind of accesses.
    pub access: Access,
    /// Share of reads in a mix, percent.
    pub read_percent: u32,
    /// Bytes of a transfer.
    pub block_bytes: u64,
    /// Bytes of the file that are used; `None`: all of one that exists.
    pub size: Option<u64>,
    /// Bytes to move, where that is not the size.
    pub io_bytes: Option<u64>,
    /// First byte that is used.
    pub offset: u64,
    /// Added to `offset` for each further copy.
    pub offset_increment: u64,
    /// Transfers in flight, 1..=16.
    pub depth: usize,
    /// Threads that do the same.
    pub copies: u32,
    /// Past the page cache; `None`: where the file system can.
    pub direct: Option<bool>,
    /// `None`: io_uring where the kernel lets it.
    pub engine: Option<IoEngine>,
    /// Memory is registered with the kernel.
    pub registered: bool,
    /// Most bytes a second of reads and writes.
    pub rate: [Option<u64>; 2],
    /// Most transfers a second of reads and writes.
    pub rate_iops: [Option<u64>; 2],
    /// Begin again until `runtime` is over.
    pub time_based: bool,
    /// Longest time.
    pub runtime: Option<Duration>,
    /// Time before anything is counted.
    pub ramp: Duration,
    /// Time before anything is done.
    pub start_delay: Duration,
    /// Copies and jobs of a group are reported as one.
    pub grouped: bool,
    /// Starts when all before it have ended.
    pub stonewall: bool,
    /// Begins a group of reports.
    pub new_group: bool,
    /// Blocks carry a header and an xxh3-128, which reads compare.
    pub verify: bool,
    /// After writing with `verify`, all is read back.
    pub verify_after: bool,
    /// Random accesses may meet a block twice before another once.
    pub any_block: bool,
    /// Passes over the file.
    pub loops: u32,
    /// Seed of places, directions and contents.
    pub seed: u64,
    /// Writes between two flushes; 0 is none.
    pub fsync: u64,
    /// A flush at the end.
    pub end_fsync: bool,
    /// A file to be written is filled first.
    pub overwrite: bool,
    /// The file is removed at the end if this run made it.
    pub unlink: bool,
}

/// Kind of accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// fio's name.
    pub name: &'static str,
    /// Reads are among them.
    pub reads: bool,
    /// Writes are among them.
    pub writes: bool,
    /// In random order.
    pub random: bool,
}

const ACCESSES: [(&str, bool, bool, bool); 7] = [
    ("read", true, false, false),
    ("write", false, true, false),
    ("randread", true, false, true),
    ("randwrite", false, true, true),
    ("rw", true, true, false),
    ("randrw", true, true, true),
    ("readwrite", true, true, false),
];

impl Access {
    fn read(text: &str) -> Option<Access> {
        let found = ACCESSES.iter().find(|(name, ..)| *name == text);
        found.map(|(name, reads, writes, random)| Access {
            name: if *name == "readwrite" { "rw" } else { name },
            reads: *reads,
            writes: *writes,
            random: *random,
        })
    }
}

impl Default for Job {
    fn default() -> Job {
        Job {
            name: "terrace-bench".to_string(),
            given: Vec::new(),
            filename: None,
            directory: None,
            access: Access::read("read").expect("it is in the table"),
            read_percent: 50,
            block_bytes: 4096,
            size: None,
            io_bytes: None,
            offset: 0,
            offset_increment: 0,
            depth: 1,
            copies: 1,
            direct: None,
            engine: None,
            registered: true,
            rate: [None; 2],
            rate_iops: [None; 2],
            time_based: false,
            runtime: None,
            ramp: Duration::ZERO,
            start_delay: Duration::ZERO,
            grouped: false,
            stonewall: false,
            new_group: false,
            verify: false,
            verify_after: true,
            any_block: false,
            loops: 1,
            seed: 0x5EED,
            fsync: 0,
            end_fsync: false,
            overwrite: false,
            unlink: true,
        }
    }
}

/// An option of a job.
pub struct Word {
    /// Its name.
    pub name: &'static str,
    /// Other names of it.
    pub also: &'static [&'static str],
    /// It needs no value: alone it is 1.
    pub flag: bool,
    /// What a value looks like, for `--help`.
    pub value: &'static str,
    /// What it does, for `--help`.
    pub meaning: &'static str,
    set: fn(&mut Job, &str) -> Option<()>,
}

macro_rules! word {
    ($name:literal, $also:expr, $value:literal, $meaning:literal,
     |$job:ident, $v:ident| $set:expr) => {
        Word {
            name: $name,
            also: &$also,
            flag: false,
            value: $value,
            meaning: $meaning,
            set: |$job, $v| {
                $set;
                Some(())
            },
        }
    };
}

macro_rules! flag_word {
    ($name:literal, $also:expr, $meaning:literal, |$job:ident, $v:ident| $set:expr) => {
        Word {
            flag: true,
            ..word!($name, $also, "0 or 1", $meaning, |$job, $v| $set)
        }
    };
}

/// All options of a job.
pub const WORDS: &[Word] = &[
    word!("name", [], "TEXT", "begins a job", |job, v| job.name =
        plain_name(v)?),
    word!(
        "filename",
        [],
        "PATH",
        "the file; one that is there and not of this tool's making is only ever read",
        |job, v| job.filename = Some(path(v)?)
    ),
    word!(
        "directory",
        [],
        "PATH",
        "where files are made, as NAME.COPY.0",
        |job, v| job.directory = Some(path(v)?)
    ),
    word!(
        "rw",
        ["readwrite"],
        "read, write, randread, randwrite, rw or randrw",
        "kind of accesses (read)",
        |job, v| job.access = Access::read(v)?
    ),
    word!(
        "rwmixread",
        [],
        "0 to 100",
        "reads in a mix (50)",
        |job, v| job.read_percent = percent(v)?
    ),
    word!(
        "rwmixwrite",
        [],
        "0 to 100",
        "writes in a mix (50)",
        |job, v| job.read_percent = 100 - percent(v)?
    ),
    word!(
        "bs",
        ["blocksize"],
        "SIZE",
        "bytes of a transfer, a multiple of 4k up to 1g (4k; an extent of the store \
         is 4m)",
        |job, v| job.block_bytes = size(v)?
    ),
    word!(
        "size",
        ["filesize"],
        "SIZE",
        "bytes of the file (all of one that is there)",
        |job, v| job.size = Some(size(v)?)
    ),
    word!(
        "io_size",
        ["io_limit"],
        "SIZE",
        "bytes to move (size)",
        |job, v| job.io_bytes = Some(size(v)?)
    ),
    word!(
        "offset",
        [],
        "SIZE",
        "first byte that is used, a multiple of 4k (0)",
        |job, v| job.offset = size_or_zero(v)?
    ),
    word!(
        "offset_increment",
        [],
        "SIZE",
        "added to offset for each further copy (0)",
        |job, v| job.offset_increment = size_or_zero(v)?
    ),
    word!(
        "iodepth",
        [],
        "1 to 16",
        "transfers in flight with either engine (1; a run has 16)",
        |job, v| job.depth = usize::try_from(number(v, 1, DEPTH as u64)?).ok()?
    ),
    word!(
        "numjobs",
        [],
        "1 to 256",
        "copies of the job, each a thread (1)",
        |job, v| job.copies = u32::try_from(number(v, 1, 256)?).ok()?
    ),
    word!(
        "direct",
        [],
        "0 or 1",
        "past the page cache (1 where the file system can)",
        |job, v| job.direct = Some(flag(v)?)
    ),
    word!(
        "buffered",
        [],
        "0 or 1",
        "through the page cache: the opposite of direct",
        |job, v| job.direct = Some(!flag(v)?)
    ),
    word!(
        "ioengine",
        [],
        "io_uring or pread",
        "a run's engines; psync and sync are pread (io_uring where allowed)",
        |job, v| job.engine = engine(v)?
    ),
    flag_word!(
        "fixedbufs",
        [],
        "memory is registered with io_uring (1)",
        |job, v| job.registered = flag(v)?
    ),
    word!(
        "rate",
        [],
        "SIZE[,SIZE]",
        "most bytes a second of a copy; two: of reads and of writes",
        |job, v| job.rate = pair(v, size)?
    ),
    word!(
        "rate_iops",
        [],
        "NUMBER[,NUMBER]",
        "most transfers a second of a copy",
        |job, v| job.rate_iops = pair(v, |v| number(v, 1, 1 << 40))?
    ),
    flag_word!(
        "time_based",
        [],
        "begin again until runtime is over",
        |job, v| job.time_based = flag(v)?
    ),
    word!(
        "runtime",
        ["timeout"],
        "TIME",
        "longest time, in seconds or with us, ms, s, m, h, d",
        |job, v| job.runtime = Some(time(v).filter(|t| !t.is_zero())?)
    ),
    word!(
        "ramp_time",
        [],
        "TIME",
        "time before anything is counted (0)",
        |job, v| job.ramp = time(v)?
    ),
    word!(
        "startdelay",
        [],
        "TIME",
        "time before anything is done (0)",
        |job, v| job.start_delay = time(v)?
    ),
    word!(
        "loops",
        [],
        "NUMBER",
        "passes over the file (1)",
        |job, v| job.loops = u32::try_from(number(v, 1, 1 << 20)?).ok()?
    ),
    flag_word!(
        "group_reporting",
        [],
        "a group's jobs and copies are reported as one",
        |job, v| job.grouped = flag(v)?
    ),
    flag_word!("new_group", [], "begins a group", |job, v| job.new_group =
        flag(v)?),
    flag_word!(
        "stonewall",
        ["wait_for_previous"],
        "starts when all before it have ended",
        |job, v| job.stonewall = flag(v)?
    ),
    word!(
        "verify",
        [],
        "xxh3 or 0",
        "blocks carry place, sequence and an xxh3-128, which reads compare (0)",
        |job, v| job.verify = match v {
            "xxh3" => true,
            "0" | "none" => false,
            _ => return None,
        }
    ),
    word!(
        "do_verify",
        [],
        "0 or 1",
        "after writing with verify, read all back (1)",
        |job, v| job.verify_after = flag(v)?
    ),
    word!(
        "fsync",
        ["fdatasync"],
        "NUMBER",
        "writes between two fdatasync; 0 is none (0)",
        |job, v| job.fsync = number(v, 0, 1 << 40)?
    ),
    word!(
        "end_fsync",
        [],
        "0 or 1",
        "fdatasync at the end of writing (0)",
        |job, v| job.end_fsync = flag(v)?
    ),
    word!(
        "overwrite",
        [],
        "0 or 1",
        "fill a file before it is written (0: only reserve it)",
        |job, v| job.overwrite = flag(v)?
    ),
    word!(
        "unlink",
        [],
        "0 or 1",
        "at the end remove what was made (1); 0 keeps it for the next run",
        |job, v| job.unlink = flag(v)?
    ),
    flag_word!(
        "norandommap",
        [],
        "random accesses need not meet every block",
        |job, v| job.any_block = flag(v)?
    ),
    word!(
        "randseed",
        [],
        "NUMBER",
        "seed of places, directions and contents",
        |job, v| job.seed = number(v, 0, u64::MAX)?
    ),
    flag_word!("thread", [], "copies are threads in any case", |_job, v| {
        flag(v)?.then_some(())?
    }),
];

/// Sets one option of a job. `place` is what an error names: `--bs`, `disk.fio:3: bs`.
///
/// # Errors
/// [`Error::Input`] for a word that is not known, or a value that is not right for it.
pub fn set(job: &mut Job, what: &'static str, place: &str, name: &str, value: &str) -> Result<()> {
    let word = find(name).ok_or_else(|| unknown(what, place, name, &[]))?;
    if (word.set)(job, value).is_none() {
        return Err(refused(word, what, place, value));
    }
    if word.name != "name" {
        job.given.retain(|(known, _)| known != word.name);
        job.given.push((word.name.to_string(), value.to_string()));
    }
    Ok(())
}

/// The option of that name.
pub fn find(name: &str) -> Option<&'static Word> {
    WORDS
        .iter()
        .find(|word| word.name == name || word.also.contains(&name))
}

/// The refusal of a word that is not known, with the nearest that is. `more` are known beside a
/// job's.
pub(super) fn unknown(what: &'static str, place: &str, name: &str, more: &[&str]) -> Error {
    let names = WORDS
        .iter()
        .flat_map(|word| [word.name].into_iter().chain(word.also.to_vec()));
    let nearest = names
        .chain(more.iter().copied())
        .min_by_key(|known| distance(known, name))
        .unwrap_or("rw");
    Error::input(
        what,
        place,
        "one of fio's words that terrace-bench knows",
        printable(name),
        format!("did you mean {nearest}? `terrace-bench --help` lists all"),
    )
}

fn refused(word: &Word, what: &'static str, place: &str, value: &str) -> Error {
    let choices: Vec<&str> = word
        .value
        .split([',', ' '])
        .filter(|c| !c.is_empty())
        .collect();
    let near = |choice: &&&str| distance(choice, value) <= 2 && **choice != "or";
    let remedy = match word.name {
        "iodepth" => format!("the engines have at most {DEPTH} in flight; use numjobs for more"),
        _ => match choices.iter().find(near) {
            Some(choice) => format!("did you mean {choice}?"),
            None => "correct it".to_string(),
        },
    };
    Error::input(
        what,
        place,
        word.value,
        format!("\"{}\"", printable(value)),
        remedy,
    )
}
