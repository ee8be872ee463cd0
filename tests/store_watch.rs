//! Goal: an operation that does not come back is named, more than once and ever more rarely, and
//! nothing is ended.
//! Method: a disk whose completions are held back until the lines have come.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, unbounded};
use terrace::host::HostArena;
use terrace::store::disk::{Direction, Disk, Finished, Operation, Waker};
use terrace::store::sim::{Faults, SimDisk};
use terrace::store::{Request, Scratch, StoredSection};
use terrace::tile::{Section, TileId};

/// Nothing comes back while the gate's other side lives.
struct Held {
    disk: SimDisk,
    gate: Receiver<()>,
}

impl Disk for Held {
    fn depth(&self) -> usize {
        self.disk.depth()
    }

    fn in_flight(&self) -> usize {
        self.disk.in_flight()
    }

    fn start(&mut self, operation: Operation) {
        self.disk.start(operation);
    }

    fn wait(&mut self, finished: &mut Vec<Finished>) {
        self.gate.recv().ok();
        self.disk.wait(finished);
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.disk.flush()
    }

    fn waker(&self) -> Waker {
        self.disk.waker()
    }
}

#[test]
fn an_operation_that_does_not_come_back_is_named_again_and_again() {
    let section = StoredSection {
        tile: TileId { layer: 2, part: 0 },
        section: Section::Moment1,
        elements: 100,
        element_bytes: 4,
    };
    let (release, gate) = unbounded();
    let disk = SimDisk::new(4096, Faults::default());
    let store = Scratch::on_disk(Box::new(Held { disk, gate }), 4096, &[section]).unwrap();
    let (sink, lines) = unbounded();
    let say = Arc::new(move |line: &str| sink.send(line.to_string()).unwrap());
    store.set_io_timeout(Duration::from_millis(5), Some(say));
    let (reply, completions) = unbounded();
    let request = Request {
        kind: Direction::Write,
        key: section.keys().next().unwrap(),
        bytes: 400,
        slab: HostArena::take(4096).unwrap().cut(4096),
        reply,
    };
    store.submit(request).unwrap();
    let waited = [0; 3].map(|_| {
        let line = lines.recv_timeout(Duration::from_secs(60)).expect("a line");
        let start = "write of tile 2.0 moment1, extent 0: simulated at byte 0 has taken ";
        let rest = line.strip_prefix(start).unwrap_or_else(|| panic!("{line}"));
        rest.split(' ').next().unwrap().parse::<f64>().unwrap()
    });
    assert!(
        waited[0] <= waited[1] && waited[1] <= waited[2],
        "{waited:?}"
    );
    assert!(completions.try_recv().is_err(), "it is still under way");
    drop(release);
    completions.recv().unwrap().result.unwrap();
}
