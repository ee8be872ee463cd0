//! A process that opens a checkpoint store, commits and prints what it did: this executable, asked
//! for its one ignored test. What holds for a process alone (a kill, a limit, a filter of system
//! calls) is tried on it.
#![allow(dead_code, reason = "each test file uses a part")]

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use terrace::config::IoEngine;
use terrace::host::Ring;
use terrace::store::{CheckpointStore, Spec};
use terrace::{Error, Result};

use super::commits;

const ORDER: &str = "TERRACE_STORE_CHILD";

/// The command of a child that makes `count` commits (0: until it is killed) in `directory`.
pub(crate) fn command(directory: &Path, engine: Option<IoEngine>, count: u64) -> Command {
    let engine = match engine {
        None => "any",
        Some(IoEngine::Uring) => "uring",
        Some(IoEngine::Pread) => "pread",
    };
    let mut command = Command::new(std::env::current_exe().expect("a test has an executable"));
    command
        .args(["--ignored", "--exact", "child", "--nocapture"])
        .env(ORDER, format!("{engine} {count} {}", directory.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

/// What a child did, from its lines.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// The store was there.
    pub(crate) opened: bool,
    /// What the store had to say.
    pub(crate) says: Vec<String>,
    /// The last generation that was acknowledged.
    pub(crate) committed: Option<u64>,
    /// Exit code and text of its error.
    pub(crate) error: Option<(u8, String)>,
}

impl Told {
    /// Takes a line into account.
    pub(crate) fn hear(&mut self, line: &str) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "opened" => self.opened = true,
            "says" => self.says.push(rest.to_string()),
            "committed" => self.committed = rest.parse().ok(),
            "error" => {
                let (code, text) = rest.split_once(' ').unwrap_or((rest, ""));
                self.error = Some((code.parse().unwrap_or(0), text.to_string()));
            }
            _ => {}
        }
    }

    /// Everything until the child ends.
    pub(crate) fn all(mut child: Child) -> Told {
        let mut told = Told::default();
        super::machine::lines(&mut child).for_each(|line| told.hear(&line));
        child.wait().ok();
        told
    }
}

/// Runs a child to its end.
pub(crate) fn tell(mut command: Command) -> Told {
    Told::all(command.spawn().expect("this executable can be started"))
}

/// What the ignored test `child` does.
pub(crate) fn child() {
    let Ok(order) = std::env::var(ORDER) else {
        return;
    };
    let mut words = order.splitn(3, ' ');
    let engine = match words.next() {
        Some("uring") => Some(IoEngine::Uring),
        Some("pread") => Some(IoEngine::Pread),
        _ => None,
    };
    let count: u64 = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
    let directory = Path::new(words.next().unwrap_or("."));
    if let Err(error) = work(directory, engine, count) {
        println!("error {} {error}", error.exit_code());
    }
}

fn work(directory: &Path, engine: Option<IoEngine>, count: u64) -> Result<()> {
    let spec = Spec {
        engine,
        ..commits::spec()
    };
    let mut store = open(directory, &spec)?;
    // The harness prints without an end of line before.
    println!("\nopened");
    for sentence in store.sentences() {
        println!("says {sentence}");
    }
    let mut made = 0;
    while count == 0 || made < count {
        let generation = store.next_generation();
        commits::commit(&mut store, generation)?;
        println!("committed {generation}");
        made += 1;
    }
    Ok(())
}

/// Opens a store. A lock that was just let go of may be held for a moment by a process that another
/// thread starts: it has the lock's file until it runs its own program.
fn open(directory: &Path, spec: &Spec) -> Result<CheckpointStore> {
    let mut attempts = 0;
    loop {
        match CheckpointStore::open_or_create(directory, spec) {
            Err(Error::Busy { .. }) if attempts < 200 => attempts += 1,
            opened => return opened,
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Opens the store that a child left and verifies all of it. `None`: there is none.
pub(crate) fn look(directory: &Path, ring: &Ring) -> std::result::Result<Vec<u64>, String> {
    if !CheckpointStore::exists(directory) {
        return Ok(Vec::new());
    }
    let store = open(directory, &commits::spec()).map_err(|e| e.to_string())?;
    let lost = store
        .sentences()
        .iter()
        .find(|said| said.starts_with("generation"));
    if let Some(lost) = lost {
        return Err(lost.clone());
    }
    commits::verify(&store, ring).map_err(|e: Error| e.to_string())?;
    Ok(store.generations())
}

/// Whether what is found is what was acknowledged, or that and the commit under way.
pub(crate) fn fits(found: &[u64], acknowledged: u64) -> bool {
    found == commits::kept(acknowledged) || found == commits::kept(acknowledged + 1)
}

/// System calls by number, each with the errno that it gives instead of being made; 0 succeeds.
pub(crate) fn filter(command: &mut Command, calls: &[(i64, u16)]) {
    let instruction = |code: u16, jt: u8, jf: u8, k: u32| libc::sock_filter { code, jt, jf, k };
    // The number of the call is the first word of what the filter sees.
    let mut program = vec![instruction(0x20, 0, 0, 0)];
    for (call, errno) in calls {
        program.push(instruction(0x15, 0, 1, *call as u32));
        program.push(instruction(
            0x06,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | u32::from(*errno),
        ));
    }
    program.push(instruction(0x06, 0, 0, libc::SECCOMP_RET_ALLOW));
    let install = move || {
        let mut program = program.clone();
        let filter = libc::sock_fprog {
            len: program.len() as u16,
            filter: program.as_mut_ptr(),
        };
        // SAFETY: the filter and its program live until the call returns.
        let refused = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(
                    libc::PR_SET_SECCOMP,
                    libc::SECCOMP_MODE_FILTER,
                    &raw const filter,
                ) != 0
        };
        match refused {
            true => Err(std::io::Error::last_os_error()),
            false => Ok(()),
        }
    };
    // SAFETY: between fork and exec only prctl and the allocator of a process with one thread.
    unsafe { command.pre_exec(install) };
}

/// A limit of the process, and the signal of its violation ignored.
pub(crate) fn limit(command: &mut Command, resource: libc::__rlimit_resource_t, bytes: u64) {
    let set = move || {
        let limit = libc::rlimit {
            rlim_cur: bytes,
            rlim_max: bytes,
        };
        // SAFETY: a structure that outlives the call.
        let refused = unsafe { libc::setrlimit(resource, &raw const limit) } != 0;
        // SAFETY: no memory is passed.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        match refused {
            true => Err(std::io::Error::last_os_error()),
            false => Ok(()),
        }
    };
    // SAFETY: between fork and exec only two system calls.
    unsafe { command.pre_exec(set) };
}
