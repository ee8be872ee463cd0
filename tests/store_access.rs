//! Goal: a store's files are its owner's alone, and nobody can make it write elsewhere.
//! Method: directories and links of every kind that are refused; what was made is looked at.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use terrace::Result;
use terrace::host::HostArena;
use terrace::store::{CheckpointStore, Scratch, Spec, StoredSection};
use terrace::tile::{Section, TileId};

fn section() -> StoredSection {
    StoredSection {
        tile: TileId { layer: 0, part: 0 },
        section: Section::Weight,
        elements: 100,
        element_bytes: 4,
    }
}

fn checkpoint(directory: &Path) -> Result<CheckpointStore> {
    let spec = Spec {
        model_hash: 1,
        keep: 1,
        sections: vec![section()],
        engine: None,
        memory: Vec::new(),
    };
    CheckpointStore::open_or_create(directory, &spec)
}

fn scratch(directory: &Path) -> Result<Scratch> {
    let paths = [(directory.to_path_buf(), 1 << 20)];
    Scratch::create(&paths, &[section()], None, &[])
}

fn mode(path: &Path) -> u32 {
    path.symlink_metadata().unwrap().permissions().mode() & 0o7777
}

fn with_mode(parent: &Path, mode: u32) -> PathBuf {
    let path = parent.join(format!("{mode:o}"));
    std::fs::create_dir(&path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

#[test]
fn what_is_made_is_its_owners_alone() {
    let parent = tempfile::tempdir().unwrap();
    let at = parent.path().join("a/b");
    let store = checkpoint(&at).unwrap();
    let spilled = scratch(&at).unwrap();
    assert_eq!((mode(&at), mode(&parent.path().join("a"))), (0o700, 0o700));
    for name in ["checkpoint.tiles", "checkpoint.lock", "scratch.lock"] {
        assert_eq!(mode(&at.join(name)), 0o600, "{name}");
    }
    // The scratch file has no name, but a descriptor.
    let name = at.join("scratch.tiles (deleted)");
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let opened = descriptors
        .map(|entry| entry.path())
        .find(|path| std::fs::read_link(path).is_ok_and(|target| target == name));
    let found = std::fs::metadata(opened.expect("it is open")).unwrap();
    assert_eq!(found.permissions().mode() & 0o7777, 0o600);
    drop((store, spilled));
}

#[test]
fn a_directory_that_others_may_write_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    for bad in [0o777, 0o770, 0o702, 0o722] {
        let at = with_mode(parent.path(), bad);
        let refusals = [checkpoint(&at).err(), scratch(&at).err()];
        for refusal in refusals.map(|refusal| refusal.unwrap_or_else(|| panic!("{bad:o}"))) {
            let text = refusal.to_string();
            assert_eq!(refusal.exit_code(), 2, "{text}");
            assert!(text.contains(&format!("mode {bad:o}")), "{text}");
        }
        let left = std::fs::read_dir(&at).unwrap().count();
        assert_eq!(left, 0, "nothing was made in {bad:o}");
    }
    for good in [0o755, 0o700, 0o1777] {
        let at = with_mode(parent.path(), good);
        checkpoint(&at).unwrap_or_else(|e| panic!("{good:o}: {e}"));
    }
}

#[test]
fn links_are_not_followed() {
    let parent = tempfile::tempdir().unwrap();
    let real = with_mode(parent.path(), 0o700);
    let link = parent.path().join("link");
    symlink(&real, &link).unwrap();
    let refused = checkpoint(&link).err().expect("a linked directory");
    assert!(refused.to_string().contains("a symbolic link"), "{refused}");
    let target = parent.path().join("target");
    for name in ["checkpoint.lock", "checkpoint.tiles", "scratch.lock"] {
        let at = real.join(name);
        std::fs::write(&target, "somebody else's").unwrap();
        std::fs::remove_file(&at).ok();
        symlink(&target, &at).unwrap();
        let refused = match name {
            "scratch.lock" => scratch(&real).err(),
            _ => checkpoint(&real).err(),
        };
        assert_eq!(refused.unwrap_or_else(|| panic!("{name}")).exit_code(), 4);
        assert!(CheckpointStore::open_read_only(&real).is_err());
        std::fs::remove_file(&at).unwrap();
    }
    // Leftovers of a creation and of a crash are removed, not followed.
    for name in ["checkpoint.tiles.new", "scratch.tiles"] {
        symlink(&target, real.join(name)).unwrap();
    }
    let made = (checkpoint(&real).unwrap(), scratch(&real).unwrap());
    assert!(!real.join("checkpoint.tiles").is_symlink());
    drop(made);
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "somebody else's");
}

/// The kernel may be writing into a slab while the process forks, and a core dump of a training
/// would be as large as its memory.
#[test]
fn the_arena_is_neither_inherited_nor_dumped() {
    let lease = HostArena::take(3 << 20).unwrap().cut(3 << 20);
    let address = lease.as_ptr().addr();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in maps.lines() {
        let range = line.split(' ').next().unwrap().split_once('-');
        let parse = |text| usize::from_str_radix(text, 16).ok();
        if let Some((Some(start), Some(end))) = range.map(|(a, b)| (parse(a), parse(b))) {
            inside = (start..end).contains(&address);
        }
        if let Some(flags) = line.strip_prefix("VmFlags:")
            && inside
        {
            let has = |flag| flags.split_whitespace().any(|word| word == flag);
            assert!(has("dc") && has("dd"), "{flags}");
            return;
        }
    }
    panic!("no mapping holds the arena");
}
