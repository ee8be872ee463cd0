//! What tests need of the machine: programs, root, mounts. What is missing is a printed skip with
//! its reason, and a line in `target/tmp/skips`, which `.ci/run` counts.
#![allow(dead_code, reason = "each test file uses a part")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use terrace::config::IoEngine;

/// Both engines.
pub(crate) const ENGINES: [IoEngine; 2] = [IoEngine::Uring, IoEngine::Pread];

/// Notes that a test was left out.
pub(crate) fn skip(test: &str, reason: &str) {
    println!("{test}: SKIP(reason: {reason})");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("skips");
    let file = std::fs::File::options()
        .create(true)
        .append(true)
        .open(path);
    writeln!(file.unwrap(), "{test}: {reason}").unwrap();
}

/// Why a test that needs root and these programs cannot run here.
pub(crate) fn lacks(programs: &[&str]) -> Option<String> {
    let root = std::fs::metadata("/proc/self").is_ok_and(|found| {
        use std::os::unix::fs::MetadataExt;
        found.uid() == 0
    });
    if !root {
        return Some("not root".to_string());
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let there = |name: &str| std::env::split_paths(&paths).any(|path| path.join(name).exists());
    let missing = programs.iter().find(|name| !there(name));
    missing.map(|name| format!("{name} is missing"))
}

/// Runs a command to its end and returns its output, or what it said when it failed.
pub(crate) fn run(command: &mut Command) -> Result<String, String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("{command:?}: {e}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).to_string()),
        false => Err(format!(
            "{command:?}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

/// A mounted file system, unmounted when dropped, also by a panic.
pub(crate) struct Mount(PathBuf);

impl Mount {
    /// `mount ARGUMENTS DIRECTORY`.
    pub(crate) fn new(arguments: &[&str], directory: &Path) -> Result<Mount, String> {
        run(Command::new("mount").args(arguments).arg(directory))?;
        Ok(Mount(directory.to_path_buf()))
    }

    /// A file system of the kind `mkfs.KIND` makes, on a file of `bytes` that is made at `image`.
    pub(crate) fn on_image(
        kind: &str,
        image: &Path,
        bytes: u64,
        directory: &Path,
    ) -> Result<Mount, String> {
        let file = std::fs::File::create(image).map_err(|e| e.to_string())?;
        file.set_len(bytes).map_err(|e| e.to_string())?;
        run(Command::new(format!("mkfs.{kind}")).arg("-q").arg(image))?;
        Mount::new(&["-o", "loop", &image.display().to_string()], directory)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // The kernel lets go of a ring's file a moment after the ring is closed.
        let unmounted = || run(Command::new("umount").arg(&self.0)).is_ok();
        if let Err(said) = wait_for("the unmount", unmounted) {
            println!("{said}");
            run(Command::new("umount").arg("-l").arg(&self.0)).ok();
        }
    }
}

/// A process that is killed when dropped, also by a panic.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// Starts it with its output discarded.
    pub(crate) fn start(command: &mut Command) -> Result<Running, String> {
        let command = command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(Stdio::null()).spawn();
        Ok(Running(child.map_err(|e| format!("{command:?}: {e}"))?))
    }

    /// SIGKILL, and waits for the end.
    pub(crate) fn kill(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until something is so, for ten seconds.
pub(crate) fn wait_for(what: &str, mut so: impl FnMut() -> bool) -> Result<(), String> {
    let start = Instant::now();
    while !so() {
        if start.elapsed() > Duration::from_secs(10) {
            return Err(format!("waited in vain for {what}"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Lines that a child prints, as long as it lives.
pub(crate) fn lines(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    let output = child.stdout.take().expect("the output is piped");
    BufReader::new(output).lines().map_while(Result::ok)
}
