//! A file system of one directory, in memory, mounted through FUSE: real files beneath the real
//! engines, that fail and lose power on demand.
//!
//! Fault model: every request that does I/O or changes a name is counted, or those of one kind;
//! one, or all from one on, fail and change nothing, or a transfer moves a part. Power failing
//! keeps, loses or tears (at 512 bytes) each write since the file's last flush, and keeps the names
//! as they were at some instant since the directory's last flush.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use terrace::store::sim::mix;

const PAGE: usize = 4096;
const ROOT: u64 = 1;
/// Most bytes of a transfer.
const TRANSFER_MAX: usize = 1 << 20;

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Transfer {
    Read,
    Write,
}

/// What fails, by the number of the request since [`FaultFs::set_faults`], counted from 1.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FsFaults {
    /// This one fails.
    pub(crate) error_at: Option<u64>,
    /// This one and all later ones fail.
    pub(crate) error_from: Option<u64>,
    /// Only requests of this kind are counted and fail.
    pub(crate) only: Option<Transfer>,
    /// Only reads and writes of this many bytes are counted and fail.
    pub(crate) bytes: Option<u64>,
    /// What they fail with; EIO where nothing is said.
    pub(crate) errno: Option<i32>,
    /// Reads and writes of more than a page move a part.
    pub(crate) short: bool,
    /// A file's flush does nothing and succeeds: what a suite must notice.
    pub(crate) file_flush_ignored: bool,
    /// A directory's flush does nothing and succeeds: what a suite must notice.
    pub(crate) directory_flush_ignored: bool,
}

#[derive(Clone, Default)]
struct Image {
    size: u64,
    pages: BTreeMap<u64, Arc<[u8; PAGE]>>,
}

impl Image {
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let within = (at % PAGE as u64) as usize;
            let (now, later) = rest.split_at(rest.len().min(PAGE - within));
            let page = self.pages.entry(at / PAGE as u64);
            let page = Arc::make_mut(page.or_insert_with(|| Arc::new([0; PAGE])));
            page[within..within + now.len()].copy_from_slice(now);
            at += now.len() as u64;
            rest = later;
        }
        self.size = self.size.max(offset + bytes.len() as u64);
    }

    fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let end = (offset + bytes as u64).min(self.size);
        let mut read = Vec::with_capacity(bytes);
        let mut at = offset;
        while at < end {
            let within = (at % PAGE as u64) as usize;
            let count = (PAGE - within).min((end - at) as usize);
            match self.pages.get(&(at / PAGE as u64)) {
                Some(page) => read.extend_from_slice(&page[within..within + count]),
                None => read.resize(read.len() + count, 0),
            }
            at += count as u64;
        }
        read
    }
}

enum Change {
    Write(u64, Vec<u8>),
    Size(u64),
}

#[derive(Default)]
struct Node {
    live: Image,
    durable: Image,
    unflushed: Vec<Change>,
    mode: u32,
}

impl Node {
    fn resize(&mut self, size: u64) {
        if size < self.live.size {
            let kept = |page: &u64| page * (PAGE as u64) < size;
            self.live.pages.retain(|page, _| kept(page));
        }
        self.live.size = size;
        self.unflushed.push(Change::Size(size));
    }

    fn flush(&mut self) {
        self.durable = self.live.clone();
        self.unflushed.clear();
    }

    /// What power failing leaves.
    fn cut(&mut self, seed: u64) {
        let mut image = std::mem::take(&mut self.durable);
        for (index, change) in self.unflushed.drain(..).enumerate() {
            let random = mix(seed ^ mix(index as u64));
            match (change, random % 3) {
                (_, 0) => {}
                (Change::Size(size), _) => image.size = size,
                (Change::Write(offset, bytes), 1) => image.write(offset, &bytes),
                (Change::Write(offset, bytes), _) => {
                    for (index, sector) in bytes.chunks(512).enumerate() {
                        if mix(random ^ index as u64) & 1 == 0 {
                            image.write(offset + 512 * index as u64, sector);
                        }
                    }
                }
            }
        }
        self.live = image.clone();
        self.durable = image;
    }
}

type Names = BTreeMap<String, u64>;

#[derive(Default)]
struct State {
    nodes: BTreeMap<u64, Node>,
    names: Names,
    /// The names as they were after each change since the directory's last flush; the first are the
    /// durable ones.
    instants: Vec<Names>,
    next: u64,
    faults: FsFaults,
    requests: u64,
}

impl State {
    /// Counts a request that moves no data; `Err` if it is one that fails.
    fn count(&mut self) -> Outcome<()> {
        self.count_kind(None, 0)
    }

    fn count_kind(&mut self, kind: Option<Transfer>, bytes: u64) -> Outcome<()> {
        if self.faults.only.is_some() && self.faults.only != kind {
            return Ok(());
        }
        if self.faults.bytes.is_some_and(|wanted| wanted != bytes) {
            return Ok(());
        }
        self.requests += 1;
        let fails = self.faults.error_at == Some(self.requests)
            || self
                .faults
                .error_from
                .is_some_and(|from| self.requests >= from);
        match fails {
            true => Err(self.faults.errno.unwrap_or(libc::EIO)),
            false => Ok(()),
        }
    }

    fn node(&mut self, ino: u64) -> Outcome<&mut Node> {
        self.nodes.get_mut(&ino).ok_or(libc::ENOENT)
    }

    fn named(&self, name: &str) -> Outcome<u64> {
        self.names.get(name).copied().ok_or(libc::ENOENT)
    }

    /// `struct fuse_attr`.
    fn attr(&self, ino: u64) -> Outcome<Packed> {
        let (mode, size) = match self.nodes.get(&ino) {
            Some(node) => (libc::S_IFREG | node.mode, node.live.size),
            None if ino == ROOT => (libc::S_IFDIR | 0o700, 0),
            None => return Err(libc::ENOENT),
        };
        let packed = Packed::default().longs(&[ino, size, size / 512, 0, 0, 0]);
        // Nanoseconds, mode, links, owner, group, device, block size, flags.
        Ok(packed.words(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]))
    }

    /// `struct fuse_entry_out`, nothing to be cached.
    fn entry(&self, ino: u64) -> Outcome<Packed> {
        let packed = Packed::default().longs(&[ino, 0, 0, 0]).words(&[0, 0]);
        Ok(packed.bytes(&self.attr(ino)?.0))
    }

    fn change_names(&mut self, change: impl FnOnce(&mut Names)) {
        change(&mut self.names);
        self.instants.push(self.names.clone());
    }

    /// Part of a transfer that happens.
    fn part(&self, bytes: usize) -> usize {
        match self.faults.short && bytes > PAGE {
            true => PAGE + mix(self.requests) as usize % (bytes - PAGE),
            false => bytes,
        }
    }
}

/// A mounted file system. Dropping it unmounts.
pub(crate) struct FaultFs {
    state: Arc<Mutex<State>>,
    directory: std::ffi::CString,
}

impl FaultFs {
    /// Mounts an empty one at `directory`.
    pub(crate) fn mount(directory: &Path) -> std::io::Result<FaultFs> {
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let options = format!(
            "fd={},rootmode=40700,user_id=0,group_id=0\0",
            device.as_raw_fd()
        );
        let directory = std::ffi::CString::new(directory.as_os_str().as_bytes())?;
        // SAFETY: four strings that end with a zero byte and outlive the call.
        let refused = unsafe {
            libc::mount(
                c"faults".as_ptr(),
                directory.as_ptr(),
                c"fuse".as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV,
                options.as_ptr().cast(),
            )
        } != 0;
        if refused {
            return Err(std::io::Error::last_os_error());
        }
        let state = Arc::new(Mutex::new(State {
            instants: vec![Names::new()],
            next: ROOT + 1,
            ..State::default()
        }));
        let served = state.clone();
        std::thread::spawn(move || serve(&device, &served));
        Ok(FaultFs { state, directory })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the faults and counts requests from here on.
    pub(crate) fn set_faults(&self, faults: FsFaults) {
        let mut state = self.state();
        state.faults = faults;
        state.requests = 0;
    }

    /// Requests since the faults were set.
    pub(crate) fn request_count(&self) -> u64 {
        self.state().requests
    }

    /// Power fails: what was not flushed may be gone. No file may be open.
    pub(crate) fn cut(&self, seed: u64) {
        let mut state = self.state();
        let instant = mix(seed) as usize % state.instants.len();
        state.names = state.instants[instant].clone();
        state.instants = vec![state.names.clone()];
        for (ino, node) in &mut state.nodes {
            node.cut(mix(seed ^ mix(*ino)));
        }
        state.faults = FsFaults::default();
    }

    /// Removes everything.
    pub(crate) fn clear(&self) {
        let mut state = self.state();
        let next = state.next;
        *state = State {
            instants: vec![Names::new()],
            next,
            ..State::default()
        };
    }
}

impl Drop for FaultFs {
    fn drop(&mut self) {
        // SAFETY: a string that ends with a zero byte.
        unsafe { libc::umount2(self.directory.as_ptr(), libc::MNT_DETACH) };
    }
}

/// An errno, or what the kernel gets.
type Outcome<T> = Result<T, i32>;

/// Bytes of an answer, in the order of its C structure.
#[derive(Default)]
struct Packed(Vec<u8>);

impl Packed {
    fn longs(mut self, values: &[u64]) -> Packed {
        values
            .iter()
            .for_each(|value| self.0.extend(value.to_le_bytes()));
        self
    }

    fn words(mut self, values: &[u32]) -> Packed {
        values
            .iter()
            .for_each(|value| self.0.extend(value.to_le_bytes()));
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Packed {
        self.0.extend_from_slice(bytes);
        self
    }
}

/// A request's body behind its header.
struct Body<'a>(&'a [u8]);

impl Body<'_> {
    fn word(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().expect("four bytes"))
    }

    fn long(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }

    /// The `nth` name from `at` on; each ends with a zero byte.
    fn name(&self, at: usize, nth: usize) -> String {
        let name = self.0[at..].split(|byte| *byte == 0).nth(nth);
        String::from_utf8_lossy(name.unwrap_or_default()).to_string()
    }
}

/// Answers the kernel until the file system is unmounted. Little-endian, as the kernel's own order
/// is where these tests run.
fn serve(device: &File, state: &Mutex<State>) {
    let mut request = vec![0; TRANSFER_MAX + 4096];
    loop {
        let length = match (&mut &*device).read(&mut request) {
            Ok(length) => length,
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
            // A request was interrupted before it was read.
            Err(_) => continue,
        };
        let header = Body(&request[..length]);
        let (opcode, unique, ino) = (header.word(4), header.long(8), header.long(16));
        let body = Body(&request[40..length]);
        let outcome = {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            match opcode {
                // Forget, interrupt, batch-forget: no answer.
                2 | 36 | 42 => continue,
                _ => answer(&mut state, opcode, ino, &body),
            }
        };
        let (errno, bytes) = match outcome {
            Ok(packed) => (0, packed.0),
            Err(errno) => (errno, Vec::new()),
        };
        let reply = Packed::default()
            .words(&[16 + bytes.len() as u32, (-errno) as u32])
            .longs(&[unique])
            .bytes(&bytes);
        // Refused only where nobody waits for it any more.
        (&mut &*device).write_all(&reply.0).ok();
    }
}

fn answer(state: &mut State, opcode: u32, ino: u64, body: &Body<'_>) -> Outcome<Packed> {
    let none = Packed::default;
    match opcode {
        // Lookup.
        1 => state.entry(state.named(&body.name(0, 0))?),
        // Getattr.
        3 => Ok(none().longs(&[0, 0]).bytes(&state.attr(ino)?.0)),
        // Setattr.
        4 => {
            state.count()?;
            let (valid, size, mode) = (body.word(0), body.long(16), body.word(68));
            if let Ok(node) = state.node(ino) {
                if valid & 1 != 0 {
                    node.mode = mode & 0o7777;
                }
                if valid & 8 != 0 {
                    node.resize(size);
                }
            }
            Ok(none().longs(&[0, 0]).bytes(&state.attr(ino)?.0))
        }
        // Unlink: the node stays, it may be open, and a cut may bring its name back.
        10 => {
            state.count()?;
            let name = body.name(0, 0);
            state.named(&name)?;
            state.change_names(|names| {
                names.remove(&name);
            });
            Ok(none())
        }
        // Rename, with and without flags.
        12 | 45 => {
            state.count()?;
            let at = if opcode == 12 { 8 } else { 16 };
            let (from, to) = (body.name(at, 0), body.name(at, 1));
            let ino = state.named(&from)?;
            state.change_names(|names| {
                names.remove(&from);
                names.insert(to, ino);
            });
            Ok(none())
        }
        // Open, of a directory too: transfers go past the page cache, so that short ones show.
        14 => Ok(none().longs(&[0]).words(&[1, 0])),
        27 => Ok(none().longs(&[0]).words(&[0, 0])),
        15 => read(state, ino, body),
        16 => write(state, ino, body),
        // Statfs: much room.
        17 => {
            let blocks = 1 << 20;
            let packed = none().longs(&[blocks, blocks, blocks, 1000, 1000]);
            Ok(packed.words(&[4096, 255, 4096, 0]).bytes(&[0; 24]))
        }
        // Release, flush (a close), releasedir, destroy.
        18 | 25 | 29 | 38 => Ok(none()),
        // Fsync.
        20 => {
            state.count()?;
            if !state.faults.file_flush_ignored {
                state.node(ino)?.flush();
            }
            Ok(none())
        }
        // Fsyncdir.
        30 => {
            state.count()?;
            if !state.faults.directory_flush_ignored {
                state.instants = vec![state.names.clone()];
            }
            Ok(none())
        }
        26 => Ok(init(body)),
        28 => Ok(readdir(state, body)),
        // Create.
        35 => {
            state.count()?;
            let ino = state.next;
            state.next += 1;
            let node = Node {
                mode: body.word(4) & 0o7777,
                ..Node::default()
            };
            state.nodes.insert(ino, node);
            let name = body.name(16, 0);
            state.change_names(|names| {
                names.insert(name, ino);
            });
            Ok(state.entry(ino)?.longs(&[0]).words(&[1, 0]))
        }
        // Fallocate.
        43 => {
            state.count()?;
            let node = state.node(ino)?;
            node.resize(node.live.size.max(body.long(8) + body.long(16)));
            Ok(none())
        }
        _ => Err(libc::ENOSYS),
    }
}

/// The agreement at the mount: big writes. Not asynchronous direct I/O, in which the kernel makes
/// an error of a short write.
fn init(body: &Body<'_>) -> Packed {
    const BIG_WRITES: u32 = 1 << 5;
    const MAX_PAGES: u32 = 1 << 22;
    let flags = body.word(12) & (BIG_WRITES | MAX_PAGES);
    let background = 64 | (48 << 16);
    let pages = (TRANSFER_MAX / PAGE) as u32;
    Packed::default()
        .words(&[7, 31, 0, flags, background, TRANSFER_MAX as u32, 1, pages])
        .bytes(&[0; 32])
}

fn read(state: &mut State, ino: u64, body: &Body<'_>) -> Outcome<Packed> {
    state.count_kind(Some(Transfer::Read), u64::from(body.word(16)))?;
    let bytes = state.part(body.word(16) as usize);
    let read = state.node(ino)?.live.read(body.long(8), bytes);
    Ok(Packed(read))
}

fn write(state: &mut State, ino: u64, body: &Body<'_>) -> Outcome<Packed> {
    state.count_kind(Some(Transfer::Write), u64::from(body.word(16)))?;
    let bytes = &body.0[40..40 + body.word(16) as usize];
    let part = &bytes[..state.part(bytes.len())];
    let node = state.node(ino)?;
    node.live.write(body.long(8), part);
    node.unflushed
        .push(Change::Write(body.long(8), part.to_vec()));
    Ok(Packed::default().words(&[part.len() as u32, 0]))
}

fn readdir(state: &State, body: &Body<'_>) -> Packed {
    let mut packed = Packed::default();
    for (index, (name, ino)) in state.names.iter().enumerate().skip(body.long(8) as usize) {
        let padding = name.len().next_multiple_of(8) - name.len();
        packed = packed
            .longs(&[*ino, index as u64 + 1])
            .words(&[name.len() as u32, u32::from(libc::DT_REG)])
            .bytes(name.as_bytes())
            .bytes(&vec![0; padding]);
    }
    packed
}
