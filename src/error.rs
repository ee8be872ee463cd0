//! The crate's one error type.
//!
//! - Every variant carries facts: what, where, expected, got, what to do. Prose is made once, here.
//! - The source error is kept, never turned into a string.
//! - [`Error::exit_code`] is the only place that knows the exit codes (DESIGN §9 of the project):
//!   1 failed, 2 usage or bad input, 3 damaged store, 4 I/O, 5 busy, 130/143 ended by a signal.
//!
//! Programmer errors are assertions, not values of this type.

use std::io;
use std::path::{Path, PathBuf};

/// Result of everything in the crate that can fail while it operates.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the facts that a person needs to put it right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A value that a person gave, or a file of theirs, is not what it should be.
    #[error("{what}: {place}: expected {expected}, got {got}; {remedy}")]
    Input {
        /// What was looked at: `run.toml`, `config.json`, `safetensors`, `dataset`.
        what: &'static str,
        /// Where: a path, a key, a line, a tensor.
        place: String,
        /// What would have been right.
        expected: String,
        /// What was there.
        got: String,
        /// What to do about it.
        remedy: String,
    },
    /// A tier cannot hold what the run needs.
    #[error("{tier} memory: needs {needed} bytes, budget {budget} ({missing} missing); {remedy}")]
    Budget {
        /// `device`, `host`, `store` or `checkpoint`.
        tier: &'static str,
        /// Least bytes that the plan needs there.
        needed: u64,
        /// Bytes that it may use.
        budget: u64,
        /// The difference.
        missing: u64,
        /// What would help.
        remedy: String,
    },
    /// The operating system refused a read, a write or a change of a file.
    #[error("{action}: {path}: {source}{remedy}", path = path.display())]
    Io {
        /// The act: `open`, `read`, `write`, `flush`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's own error.
        source: io::Error,
        /// Empty, or `; ` and what to do.
        remedy: String,
    },
    /// Another process holds the file or directory.
    #[error(
        "{path}: in use by {holder}; stop it or choose another directory",
        path = path.display(), holder = holder_text(*pid)
    )]
    Busy {
        /// What is held.
        path: PathBuf,
        /// Its holder, `0` where unknown.
        pid: u32,
    },
    /// What was being read has been overwritten: no damage, the training has moved on.
    #[error(
        "{path}: generation {generation} was overwritten by the running training while it was \
         read; read a newer one", path = path.display()
    )]
    Overwritten {
        /// The file.
        path: PathBuf,
        /// Of the commit that was read.
        generation: u64,
    },
    /// A file of Terrace's own is damaged.
    #[error(
        "{path}: {what} at byte {offset}: expected {expected}, got {got}; {remedy}",
        path = path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        what: String,
        /// Where that part begins.
        offset: u64,
        /// What was expected.
        expected: String,
        /// What was there.
        got: String,
        /// What to do.
        remedy: String,
    },
    /// An extent was read whose bytes are not those that were written.
    #[error(
        "{path}: {tile}, extent {extent} at byte {offset}: checksum expected {expected:032x}, \
         got {got:032x}; the bytes on the disk changed or were never written: check the drive, \
         and take another commit (--step, --resume=STEP)", path = path.display()
    )]
    ExtentChecksum {
        /// The store's file.
        path: PathBuf,
        /// Tile and section, as they print.
        tile: String,
        /// Index of the extent within its section.
        extent: u32,
        /// Its byte offset in the file.
        offset: u64,
        /// Checksum kept outside the extent.
        expected: u128,
        /// Checksum of the bytes read.
        got: u128,
    },
    /// A tile's I/O failed; the store takes no more requests.
    #[error(
        "{action} of {tile}, extent {extent}: {path} at byte {offset}: {source} \
         (needed {needed} bytes, free {free}); the run stopped, resume from the last commit",
        path = path.display()
    )]
    TileIo {
        /// `read` or `write`.
        action: &'static str,
        /// The store's file.
        path: PathBuf,
        /// Tile and section, as they print.
        tile: String,
        /// Index of the extent within its section.
        extent: u32,
        /// Byte offset in the file.
        offset: u64,
        /// Bytes of the request.
        needed: u64,
        /// Bytes free on the file system.
        free: u64,
        /// The system's own error.
        source: io::Error,
    },
    /// An earlier failure of the store, met again by a later call.
    #[error("store stopped after its first failure: {first}")]
    StoreFailed {
        /// The first failure, as it printed.
        first: String,
    },
    /// A call of the device's driver or libraries failed; the device takes no more work.
    #[error("{device}: {call}: {message}{during}{remedy}")]
    Device {
        /// The device: `cuda:0`.
        device: String,
        /// The call with what it was about: `cuMemAlloc of 1024 bytes`, `launch of rope_bf16`.
        call: String,
        /// The driver's words.
        message: String,
        /// Empty, or ` during ` and the step's action at whose end it was met.
        during: String,
        /// Empty, or `; ` and what to do.
        remedy: String,
    },
    /// A loss, norm or gradient that is not a number, or too large for one.
    #[error(
        "step {step}: {what} is {value}; nothing of this step is kept, {last_commit}; \
         lower the learning rate or look at the step's data"
    )]
    NonFinite {
        /// The step, counted from 1.
        step: u64,
        /// `loss`, `gradient norm` or a tile's gradient.
        what: String,
        /// The value, as it prints.
        value: String,
        /// The last commit, named, or that there is none.
        last_commit: String,
    },
    /// A failure that ended a run under way.
    #[error("{source}; {last_commit}")]
    Stopped {
        /// What failed.
        source: Box<Error>,
        /// The last commit, named, or that there is none.
        last_commit: String,
    },
    /// Something asked for that Terrace does not do.
    #[error("{what}: {got} is not supported; supported: {supported}")]
    Unsupported {
        /// What was asked for: `architecture`, `rope type`.
        what: &'static str,
        /// Its name.
        got: String,
        /// The list of those that are.
        supported: String,
    },
    /// A signal ended the run after a complete step, which is committed if checkpoints are on.
    #[error("ended by signal {signal} after step {step}")]
    Interrupted {
        /// Signal number.
        signal: i32,
        /// Last complete step.
        step: u64,
    },
}

impl Error {
    /// Of two refusals, by an earlier attempt and by this one, that which lacks less of a tier; the
    /// earlier where they are not alike.
    pub(crate) fn or_nearer(self, earlier: Option<Error>) -> Error {
        match (&self, earlier) {
            (_, None) => self,
            (Error::Budget { tier, missing, .. }, Some(earlier)) => match &earlier {
                Error::Budget {
                    tier: same,
                    missing: more,
                    ..
                } if tier == same && missing < more => self,
                _ => earlier,
            },
            (_, Some(earlier)) => earlier,
        }
    }

    /// Exit code of a tool that ends with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Input { .. } | Error::Budget { .. } | Error::Unsupported { .. } => 2,
            Error::Damaged { .. } | Error::ExtentChecksum { .. } => 3,
            Error::Io { .. } | Error::TileIo { .. } | Error::StoreFailed { .. } => 4,
            Error::Busy { .. } | Error::Overwritten { .. } => 5,
            Error::NonFinite { .. } | Error::Device { .. } => 1,
            Error::Stopped { source, .. } => source.exit_code(),
            Error::Interrupted { signal, .. } => u8::try_from(128 + signal).unwrap_or(1),
        }
    }

    /// Whether the reader of a tool's output went away, which ends the tool quietly.
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
    }

    /// A failed transfer or checksum of an extent once more, for another who meets it; of any
    /// other error its words, as [`Error::StoreFailed`].
    pub fn again(&self) -> Error {
        match self {
            Error::ExtentChecksum {
                path,
                tile,
                extent,
                offset,
                expected,
                got,
            } => Error::ExtentChecksum {
                path: path.clone(),
                tile: tile.clone(),
                extent: *extent,
                offset: *offset,
                expected: *expected,
                got: *got,
            },
            Error::TileIo {
                action,
                path,
                tile,
                extent,
                offset,
                needed,
                free,
                source,
            } => Error::TileIo {
                action,
                path: path.clone(),
                tile: tile.clone(),
                extent: *extent,
                offset: *offset,
                needed: *needed,
                free: *free,
                source: match source.raw_os_error() {
                    Some(code) => io::Error::from_raw_os_error(code),
                    None => io::Error::new(source.kind(), source.to_string()),
                },
            },
            other => Error::StoreFailed {
                first: other.to_string(),
            },
        }
    }

    /// An [`Error::Input`] from its five facts.
    pub fn input(
        what: &'static str,
        place: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        Error::Input {
            what,
            place: place.into(),
            expected: expected.into(),
            got: got.into(),
            remedy: remedy.into(),
        }
    }

    /// An [`Error::Io`] without a remedy.
    pub fn io(action: &'static str, path: &Path, source: io::Error) -> Error {
        Error::Io {
            action,
            path: path.to_path_buf(),
            source,
            remedy: String::new(),
        }
    }
}

/// A process by its id, `0` where unknown.
pub(crate) fn holder_text(pid: u32) -> String {
    match pid {
        0 => "another process".to_string(),
        pid => format!("process {pid}"),
    }
}

/// `text` with control characters and direction marks shown as escapes, at most 120 characters:
/// names from foreign files are printed through this.
pub fn printable(text: &str) -> String {
    let mut shown = String::new();
    for (count, c) in text.chars().enumerate() {
        if count == 120 {
            shown.push('…');
            break;
        }
        let hidden = c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}')
            || matches!(c, '\u{2066}'..='\u{2069}');
        if hidden {
            shown.extend(c.escape_unicode())
        } else {
            shown.push(c)
        }
    }
    shown
}
