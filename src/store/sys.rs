//! System calls that std lacks. Each function makes one call and turns its result into a value.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Reserves the first `bytes` of `file`, so that later writes there cannot lack space.
pub(super) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    let bytes = i64::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    loop {
        // SAFETY: the descriptor is open as long as `file` is borrowed; no memory is passed.
        let refused = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes) } != 0;
        if !refused {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// The user whose rights this process has.
pub(super) fn user() -> u32 {
    // SAFETY: no memory is passed, and the call cannot fail.
    unsafe { libc::geteuid() }
}

/// What the file system of a path says of itself.
pub(super) struct FileSystem {
    /// Its name, or its magic number in hexadecimal.
    pub(super) name: String,
    /// Bytes free to this process.
    pub(super) free: u64,
    /// Lost at a reboot.
    pub(super) volatile: bool,
    /// Reached over a network, where locks and flushes mean less.
    pub(super) remote: bool,
}

/// Asks the file system of `path`.
pub(super) fn file_system(path: &Path) -> io::Result<FileSystem> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: an all-zero statfs is a value of it: integers only.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `name` ends with a zero byte and `stat` is a statfs; both outlive the call.
    if unsafe { libc::statfs(name.as_ptr(), &raw mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let magic = stat.f_type as u64 & 0xffff_ffff;
    let known = match magic {
        0xef53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683e => "btrfs",
        0x0102_1994 => "tmpfs",
        0x8584_58f6 => "ramfs",
        0x794c_7630 => "overlay",
        0x6969 => "nfs",
        0x6573_5546 => "fuse",
        0xff53_4d42 => "cifs",
        0xfe53_4d42 => "smb2",
        0x0102_1997 => "9p",
        0x0bd0_0bd0 => "lustre",
        0x00c3_6400 => "ceph",
        0x2fc1_2fc1 => "zfs",
        0xf2f5_2010 => "f2fs",
        _ => "",
    };
    Ok(FileSystem {
        name: if known.is_empty() {
            format!("file system {magic:#x}")
        } else {
            known.to_string()
        },
        free: (stat.f_bavail as u64).saturating_mul(stat.f_bsize as u64),
        volatile: matches!(known, "tmpfs" | "ramfs"),
        remote: matches!(
            known,
            "nfs" | "fuse" | "cifs" | "smb2" | "9p" | "lustre" | "ceph"
        ),
    })
}

/// Bytes free at `path`, or in its directory where it does not exist; 0 where nobody says.
pub(super) fn free_bytes(path: &Path) -> u64 {
    let asked = file_system(path).or_else(|_| file_system(path.parent().unwrap_or(path)));
    asked.map_or(0, |found| found.free)
}

/// A counter in the kernel that a ring can poll and another thread can raise.
pub(super) fn event_counter() -> io::Result<File> {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Asks for huge pages for memory that nobody has touched. Memory without them serves as well, only
/// slower.
pub(crate) fn advise_huge_pages(memory: &mut [u8]) {
    let (start, bytes) = (memory.as_mut_ptr(), memory.len());
    // SAFETY: the range is the slice's own, and the advice changes nothing that it holds.
    unsafe { libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE) };
}
