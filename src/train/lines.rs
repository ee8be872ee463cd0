//! A file of JSON lines with a step in each, in step with the commits.
//!
//! - After a resume the lines of steps that were lost with the crash are taken out, so that a step
//!   is told once. A run that begins anew keeps an earlier run's file beside its own.
//! - A line that cannot be written is lost, and the run goes on: its state is in its commits. The
//!   first such line leaves a warning.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};

/// Most files of earlier runs in a directory.
const ASIDE_MAX: u32 = 1000;

/// The file.
pub(super) struct Lines {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    length: u64,
    /// A line was lost.
    failed: bool,
    warning: Option<String>,
}

impl Lines {
    /// Opens `dir`/`name` to append, keeping lines up to `step`; `seen` is shown every line that is
    /// there. At step 0 none would be kept: a file that holds any is renamed to the first free of
    /// `name`.1, `name`.2, …
    pub(super) fn open(
        dir: &Path,
        name: &str,
        step: u64,
        seen: impl FnMut(&Value),
    ) -> Result<Lines> {
        std::fs::create_dir_all(dir).map_err(|e| Error::io("make log.dir", dir, e))?;
        let path = dir.join(name);
        if let Ok(old) = File::open(&path) {
            lock(&old, &path)?;
        }
        if step == 0 {
            set_aside(&path)?;
        }
        let Kept {
            bytes,
            first_left_out,
        } = kept_lines(&path, step, seen)?;
        if let Some(first_left_out) = first_left_out {
            let staged = dir.join(format!("{name}.new"));
            let replaced =
                std::fs::write(&staged, &bytes).and_then(|()| std::fs::rename(&staged, &path));
            // A full disk holds no second copy: what follows the first lost line goes with it.
            if replaced.is_err() {
                std::fs::remove_file(&staged).ok();
                let cut = OpenOptions::new().write(true).open(&path);
                cut.and_then(|file| file.set_len(first_left_out))
                    .map_err(|e| Error::io("cut", &path, e))?;
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|e| Error::io("open", &path, e))?;
        lock(&file, &path)?;
        let found = file
            .metadata()
            .map_err(|e| Error::io("look at", &path, e))?;
        Ok(Lines {
            path,
            file,
            length: found.len(),
            failed: false,
            warning: None,
        })
    }

    /// The warning of the first line that was lost, once.
    pub(super) fn take_warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    /// Makes durable, when called, what was written by now. What that cannot save is lines.
    pub(super) fn syncer(&self) -> Box<dyn FnOnce() + Send> {
        let file = self.file.try_clone();
        Box::new(move || {
            file.and_then(|file| file.sync_data()).ok();
        })
    }

    /// Appends a line.
    pub(super) fn push(&mut self, value: &Value) {
        let line = format!("{value}\n");
        match self.file.write_all(line.as_bytes()) {
            Ok(()) => self.length += line.len() as u64,
            Err(error) => {
                // No half of a line stays; where even that is refused, a reader leaves it out.
                self.file.set_len(self.length).ok();
                if !self.failed {
                    self.failed = true;
                    self.warning = Some(format!(
                        "warning: {}: {error}; its lines are lost until there is space, the run \
                         goes on",
                        self.path.display()
                    ));
                }
            }
        }
    }
}

/// Takes the kernel's lock on the file, which ends with its holder: a run without checkpoints
/// has no other lock, and a second one would replace the file that the first still writes.
fn lock(file: &File, path: &Path) -> Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(Error::Busy {
            path: path.to_path_buf(),
            pid: 0,
        }),
        // No locks there (some network file systems): the run can do without.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

/// Renames an earlier run's file, if it holds anything.
fn set_aside(path: &Path) -> Result<()> {
    if !std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() > 0) {
        return Ok(());
    }
    let aside = (1..=ASIDE_MAX)
        .map(|number| path.with_added_extension(number.to_string()))
        .find(|aside| aside.symlink_metadata().is_err());
    let aside = aside.ok_or_else(|| {
        Error::input(
            "log.dir",
            path.display().to_string(),
            format!("fewer than {ASIDE_MAX} such files of earlier runs"),
            "more",
            "move them elsewhere, or choose another log.dir",
        )
    })?;
    std::fs::rename(path, &aside).map_err(|e| Error::io("rename", path, e))
}

/// What of a file stays.
#[derive(Default)]
struct Kept {
    /// Its lines.
    bytes: Vec<u8>,
    /// Where the first line begins that does not stay as it is, if there is one.
    first_left_out: Option<u64>,
}

/// Lines of a file up to `step`; a line that a crash cut or garbled is left out.
fn kept_lines(path: &Path, step: u64, mut seen: impl FnMut(&Value)) -> Result<Kept> {
    let mut kept = Kept::default();
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(kept),
        Err(error) => return Err(Error::io("open", path, error)),
    };
    // By bytes: what a crash left behind need not be text.
    let (mut reader, mut line) = (BufReader::new(file), Vec::new());
    let mut next = 0u64;
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line);
        let read = read.map_err(|e| Error::io("read", path, e))?;
        if read == 0 {
            return Ok(kept);
        }
        let value: Value = serde_json::from_slice(&line).unwrap_or_default();
        seen(&value);
        let is_kept = value["step"].as_u64().is_some_and(|at| at <= step);
        if is_kept {
            kept.bytes.extend_from_slice(&line);
        }
        let is_ended = line.ends_with(b"\n");
        if is_kept && !is_ended {
            kept.bytes.push(b'\n');
        }
        if !is_kept || !is_ended {
            kept.first_left_out.get_or_insert(next);
        }
        next += read as u64;
    }
}
