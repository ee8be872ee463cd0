//! Jobs from a command line in fio's words and from INI files.
//!
//! - `--name` begins a job; what stands before the first is common to all. A word that is not an
//!   option is a job file.
//! - `[global]` holds for the jobs after it, and every further `[global]` adds to it.
//! - A file's options win over those that the command line gives before it.

use std::path::{Path, PathBuf};

use super::words::{self, Job};
use crate::error::{Error, Result, printable};

/// What a command line asks for.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The jobs, in order.
    pub jobs: Vec<Job>,
    /// JSON instead of text.
    pub json: bool,
    /// Where the output goes; `None` is standard output.
    pub output: Option<PathBuf>,
    /// Where an HTML report goes.
    pub report: Option<PathBuf>,
    /// Nothing is run.
    pub parse_only: bool,
    /// A line of progress, or none; `None`: on a terminal.
    pub progress: Option<bool>,
}

/// Options of a whole invocation: name, value, meaning.
pub const GENERAL: [(&str, &str, &str); 6] = [
    (
        "output-format",
        "normal or json",
        "text like fio's, or fio's JSON (normal)",
    ),
    ("output", "FILE", "where to write it (standard output)"),
    (
        "report",
        "FILE",
        "write bandwidth over time and latencies as one HTML file",
    ),
    (
        "section",
        "NAME",
        "run only this job of the file; may come several times",
    ),
    (
        "parse-only",
        "",
        "read all options, print the jobs, run nothing",
    ),
    (
        "eta",
        "auto, always or never",
        "a line of progress (auto: on a terminal)",
    ),
];

const ARGUMENTS: &str = "arguments";
/// Most bytes of a job file, and most jobs.
const FILE_BYTES_MAX: u64 = 1 << 20;
const JOBS_MAX: usize = 256;

/// Reads a command line, without the program's name.
///
/// # Errors
/// [`Error::Input`] for a word or value that is not right, with the nearest that is;
/// [`Error::Io`] for a job file that cannot be read.
pub fn parse(arguments: &[String]) -> Result<Request> {
    let mut request = Request::default();
    let mut common = Job::default();
    let mut sections: Vec<String> = Vec::new();
    let (mut named, mut files, mut given) = (false, false, false);
    let mut left = arguments.iter().peekable();
    while let Some(argument) = left.next() {
        let Some(option) = argument.strip_prefix('-') else {
            files = true;
            let path = Path::new(argument);
            request.jobs.extend(read_file(path, &common)?);
            continue;
        };
        let option = option.strip_prefix('-').unwrap_or(option);
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (option, None),
        };
        let place = format!("--{}", printable(name));
        let word = words::find(name);
        let alone = word.is_some_and(|word| word.flag) || name == "parse-only";
        let value = match value {
            Some(value) => value.to_string(),
            None if alone => {
                let next = left.peek().map(|next| next.as_str());
                let own = matches!(next, Some("0" | "1")) && name != "parse-only";
                if own { left.next().cloned() } else { None }.unwrap_or_else(|| "1".to_string())
            }
            None => match left.next() {
                Some(value) => value.clone(),
                None if known(name) => {
                    let expected = word.map_or("a value", |word| word.value);
                    return Err(Error::input(
                        ARGUMENTS, place, expected, "nothing", "add it",
                    ));
                }
                None => String::new(),
            },
        };
        if word.is_none() {
            general(&mut request, &mut sections, name, &value)?;
            continue;
        }
        given = true;
        if name == "name" {
            named = true;
            request.jobs.push(common.clone());
        }
        let job = if named { request.jobs.last_mut() } else { None };
        words::set(job.unwrap_or(&mut common), ARGUMENTS, &place, name, &value)?;
    }
    if given && !named && !files {
        request.jobs.push(common);
    }
    choose_sections(&mut request.jobs, &sections)?;
    finish(request)
}

fn known(name: &str) -> bool {
    words::find(name).is_some() || GENERAL.iter().any(|(known, ..)| *known == name)
}

fn general(
    request: &mut Request,
    sections: &mut Vec<String>,
    name: &str,
    value: &str,
) -> Result<()> {
    match (name, value) {
        ("output-format", "normal") => request.json = false,
        ("output-format", "json") => request.json = true,
        ("output", path) if !path.is_empty() => request.output = Some(PathBuf::from(path)),
        ("report", path) if !path.is_empty() => request.report = Some(PathBuf::from(path)),
        ("section", section) => sections.push(section.to_string()),
        ("parse-only", "1") => request.parse_only = true,
        ("parse-only", "0") => request.parse_only = false,
        ("eta", "auto") => request.progress = None,
        ("eta", "always") => request.progress = Some(true),
        ("eta", "never") => request.progress = Some(false),
        _ => {
            let place = format!("--{}", printable(name));
            let names = GENERAL.map(|(known, ..)| known);
            let Some((_, expected, _)) = GENERAL.iter().find(|(known, ..)| *known == name) else {
                return Err(words::unknown(ARGUMENTS, &place, name, &names));
            };
            let got = format!("\"{}\"", printable(value));
            return Err(Error::input(ARGUMENTS, place, *expected, got, "correct it"));
        }
    }
    Ok(())
}

fn choose_sections(jobs: &mut Vec<Job>, sections: &[String]) -> Result<()> {
    for section in sections {
        if !jobs.iter().any(|job| job.name == *section) {
            let names: Vec<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
            let expected = format!("a job ({})", names.join(", "));
            let got = printable(section);
            return Err(Error::input(
                ARGUMENTS,
                "--section",
                expected,
                got,
                "correct it",
            ));
        }
    }
    jobs.retain(|job| sections.is_empty() || sections.contains(&job.name));
    Ok(())
}

fn finish(request: Request) -> Result<Request> {
    let count = request.jobs.len();
    if count == 0 || count > JOBS_MAX {
        return Err(Error::input(
            ARGUMENTS,
            "jobs",
            format!("1 to {JOBS_MAX}"),
            count.to_string(),
            "write `terrace-bench --name=NAME --rw=read --size=1g`, or name a job file",
        ));
    }
    for job in &request.jobs {
        check(job)?;
    }
    Ok(request)
}

/// What no word can say alone.
fn check(job: &Job) -> Result<()> {
    let refused = |name: &str, expected: &str, got: String, remedy: &str| {
        let place = format!("job {}: {name}", printable(&job.name));
        Err(Error::input("jobs", place, expected, got, remedy))
    };
    let bytes = job.block_bytes;
    if !bytes.is_multiple_of(4096) || bytes > 1 << 30 {
        let expected = "a multiple of 4096 up to 1g";
        return refused(
            "bs",
            expected,
            bytes.to_string(),
            "bs=4m is an extent of the store",
        );
    }
    for (name, bytes) in [
        ("offset", job.offset),
        ("offset_increment", job.offset_increment),
    ] {
        if !bytes.is_multiple_of(4096) {
            return refused(name, "a multiple of 4096", bytes.to_string(), "correct it");
        }
    }
    if job.verify && !job.offset.is_multiple_of(bytes) {
        let expected = format!("a multiple of bs, {bytes}, to verify");
        return refused("offset", &expected, job.offset.to_string(), "correct it");
    }
    if let Some(size) = job.size.filter(|size| *size < bytes) {
        let expected = format!("at least bs, {bytes}");
        return refused("size", &expected, size.to_string(), "raise it or lower bs");
    }
    if job.time_based && job.runtime.is_none() {
        return refused(
            "time_based",
            "a runtime beside it",
            "none".into(),
            "add runtime=30",
        );
    }
    let shared = job.filename.is_some() && job.directory.is_none() && job.offset_increment == 0;
    if job.verify && job.access.writes && job.copies > 1 && shared {
        let remedy = "give each its own: directory instead of filename, or offset_increment";
        return refused(
            "verify",
            "one writer a block",
            format!("numjobs={}", job.copies),
            remedy,
        );
    }
    if job.filename.is_none() && job.size.is_none() {
        return refused(
            "size",
            "bytes of the file to make",
            "none".into(),
            "add size=1g",
        );
    }
    Ok(())
}

/// Reads a job file.
///
/// # Errors
/// As [`parse`].
pub fn read_file(path: &Path, common: &Job) -> Result<Vec<Job>> {
    let unreadable = |source| Error::Io {
        action: "read",
        path: path.to_path_buf(),
        source,
        remedy: "; options begin with --, other words are job files".to_string(),
    };
    let found = std::fs::metadata(path).map_err(unreadable)?;
    if !found.is_file() || found.len() > FILE_BYTES_MAX {
        let expected = format!("a file of at most {FILE_BYTES_MAX} bytes");
        let got = if found.is_file() {
            found.len().to_string()
        } else {
            "no file".to_string()
        };
        let place = path.display().to_string();
        return Err(Error::input(
            "job file",
            place,
            expected,
            got,
            "name another",
        ));
    }
    let text = std::fs::read(path).map_err(unreadable)?;
    let text = String::from_utf8_lossy(&text);
    read_text(&text, &path.display().to_string(), common)
}

/// Reads the text of a job file; `file` is its name for errors.
///
/// # Errors
/// As [`parse`].
pub fn read_text(text: &str, file: &str, common: &Job) -> Result<Vec<Job>> {
    const WHAT: &str = "job file";
    let mut global = common.clone();
    let mut jobs: Vec<Job> = Vec::new();
    let mut section: Option<String> = None;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with([';', '#']) {
            continue;
        }
        let at = format!("{file}:{}", index + 1);
        if let Some(rest) = line.strip_prefix('[') {
            let Some(name) = rest
                .strip_suffix(']')
                .map(str::trim)
                .filter(|n| !n.is_empty())
            else {
                let got = printable(line);
                return Err(Error::input(WHAT, at, "[NAME]", got, "close the bracket"));
            };
            if name != "global" {
                jobs.push(global.clone());
                let job = jobs.last_mut().expect("just pushed");
                words::set(job, WHAT, &at, "name", name)?;
                if jobs.len() > JOBS_MAX {
                    let expected = format!("at most {JOBS_MAX} jobs");
                    return Err(Error::input(WHAT, at, expected, "more", "split the file"));
                }
            }
            section = Some(name.to_string());
            continue;
        }
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name.trim(), value.trim()),
            None => (line, ""),
        };
        let place = format!("{at}: {}", printable(name));
        let value = expand(value, &place)?;
        let job = match section.as_deref() {
            None => {
                let remedy = "begin with [global] or [NAME]";
                return Err(Error::input(
                    WHAT,
                    place,
                    "a section before it",
                    "none",
                    remedy,
                ));
            }
            Some("global") => &mut global,
            Some(_) => jobs.last_mut().expect("a section made it"),
        };
        let flag = words::find(name).is_some_and(|word| word.flag);
        let alone = flag && !line.contains('=');
        words::set(job, WHAT, &place, name, if alone { "1" } else { &value })?;
    }
    Ok(jobs)
}

/// Replaces `${NAME}` by the environment's value.
fn expand(value: &str, place: &str) -> Result<String> {
    let mut text = String::new();
    let mut rest = value;
    while let Some((before, after)) = rest.split_once("${") {
        let Some((name, tail)) = after.split_once('}') else {
            break;
        };
        let found = std::env::var(name).map_err(|_| {
            let got = format!("${{{}}}, which is not set", printable(name));
            Error::input(
                "job file",
                place,
                "a variable of the environment",
                got,
                "set it",
            )
        })?;
        text.push_str(before);
        text.push_str(&found);
        rest = tail;
    }
    Ok(text + rest)
}
