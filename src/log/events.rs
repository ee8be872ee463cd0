//! TensorBoard's event files: records of TFRecord around the few fields of its Event messages that
//! scalars and texts need.
//!
//! - A record is its length (u64), the masked CRC-32C of that, the bytes, the masked CRC-32C of
//!   those; little-endian. It is written by one call, so that a reader beside sees whole ones.
//! - A process has a file of its own, named so that it sorts after those before it. It begins with
//!   the version and a session's START at the first step to come: readers then take out what
//!   earlier files tell of that step and later ones, which were lost with a crash.
//! - A run from the beginning renames the directory of the one before.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Result, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Most directories of earlier runs beside each other.
const ASIDE_MAX: u32 = 1000;

/// `DT_STRING` of TensorFlow's types.
const STRING: u64 = 7;
/// `START` of a SessionLog.
const START: u64 = 1;

/// An event file that is written.
pub struct EventFile {
    path: PathBuf,
    file: File,
    /// Bytes of whole records.
    length: u64,
    /// Half a record could not be taken out again.
    broken: bool,
}

impl EventFile {
    /// A new file under `directory`, for a process whose first step will be `first_step`, counted
    /// from 1.
    pub fn create(directory: &Path, first_step: u64) -> Result<EventFile> {
        if first_step <= 1 {
            set_aside(directory)?;
        }
        std::fs::create_dir_all(directory)?;
        let path = directory.join(file_name(directory)?);
        let file = OpenOptions::new()
            .create_new(true)
            .append(true)
            .open(&path)?;
        let mut events = EventFile {
            path,
            file,
            length: 0,
            broken: false,
        };
        events.event(0, |event| event.bytes(3, b"brain.Event:2"))?;
        events.event(first_step, |event| {
            event.message(7, |session| session.varint(1, START));
        })?;
        Ok(events)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends numbers of a step, by tag.
    pub fn scalars(&mut self, step: u64, values: &[(String, f64)]) -> Result<()> {
        self.event(step, |event| {
            event.message(5, |summary| {
                for (tag, value) in values {
                    summary.message(1, |of| {
                        of.bytes(1, tag.as_bytes());
                        of.float(2, *value as f32);
                    });
                }
            });
        })
    }

    /// Appends a text, which TensorBoard reads as Markdown.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) -> Result<()> {
        self.event(step, |event| {
            event.message(5, |summary| {
                summary.message(1, |value| {
                    value.bytes(1, tag.as_bytes());
                    value.message(9, |about| {
                        about.message(1, |plugin| plugin.bytes(1, b"text"));
                    });
                    value.message(8, |tensor| {
                        tensor.varint(1, STRING);
                        tensor.message(2, |shape| shape.message(2, |size| size.varint(1, 1)));
                        tensor.bytes(8, text.as_bytes());
                    });
                });
            });
        })
    }

    fn event(&mut self, step: u64, write: impl FnOnce(&mut Message)) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut event = Message::default();
        event.double(1, now.unwrap_or_default().as_secs_f64());
        event.varint(2, step);
        write(&mut event);
        self.record(&event.0)
    }

    fn record(&mut self, bytes: &[u8]) -> Result<()> {
        if self.broken {
            return Err(Error::other("half a record is at the end of the file"));
        }
        let length = (bytes.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(bytes.len() + 16);
        record.extend_from_slice(&length);
        record.extend_from_slice(&masked(&length).to_le_bytes());
        record.extend_from_slice(bytes);
        record.extend_from_slice(&masked(bytes).to_le_bytes());
        match self.file.write_all(&record) {
            Ok(()) => self.length += record.len() as u64,
            Err(error) => {
                // Readers stop at half a record and never see what follows it.
                self.broken = self.file.set_len(self.length).is_err();
                return Err(error);
            }
        }
        Ok(())
    }
}

/// CRC-32C as TFRecord has it: rotated right by 15 bits, plus a constant.
fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
}

/// A protobuf message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// A field's number and wire type: 0 varint, 1 of 8 bytes, 2 with a length, 5 of 4 bytes.
    fn key(&mut self, field: u64, wire: u64) {
        self.raw_varint(field << 3 | wire);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.key(field, 2);
        self.raw_varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn message(&mut self, field: u64, write: impl FnOnce(&mut Message)) {
        let mut inner = Message::default();
        write(&mut inner);
        self.bytes(field, &inner.0);
    }
}

/// Seconds in an event file's name.
fn seconds_of(name: &str) -> Option<u64> {
    let rest = name.strip_prefix("events.out.tfevents.")?;
    rest.split('.').next()?.parse().ok()
}

/// A name that sorts after those in `directory`, whatever the clock says.
fn file_name(directory: &Path) -> Result<String> {
    let mut last = 0;
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name();
        last = last.max(name.to_str().and_then(seconds_of).unwrap_or(0));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = now.unwrap_or_default().as_secs().max(last + 1);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host: String = host
        .trim()
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
        .collect();
    let host = if host.is_empty() { "localhost" } else { &host };
    let process = std::process::id();
    Ok(format!(
        "events.out.tfevents.{seconds:010}.{host}.{process}"
    ))
}

/// Renames a directory of event files, if it is one, to the first free of `NAME.1`, `NAME.2`, …
fn set_aside(directory: &Path) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Ok(());
    };
    let is_events = |name: &std::ffi::OsStr| name.to_str().and_then(seconds_of).is_some();
    if !entries.flatten().any(|entry| is_events(&entry.file_name())) {
        return Ok(());
    }
    let aside = (1..=ASIDE_MAX)
        .map(|number| directory.with_added_extension(number.to_string()))
        .find(|aside| aside.symlink_metadata().is_err());
    let full = || Error::new(ErrorKind::AlreadyExists, "too many earlier runs beside it");
    std::fs::rename(directory, aside.ok_or_else(full)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records of a file, their checksums compared.
    fn records(path: &Path) -> Vec<Vec<u8>> {
        let bytes = std::fs::read(path).unwrap();
        let mut rest = &bytes[..];
        let mut records = Vec::new();
        while !rest.is_empty() {
            let (head, after) = rest.split_at(12);
            let length = u64::from_le_bytes(head[..8].try_into().unwrap()) as usize;
            assert_eq!(masked(&head[..8]).to_le_bytes(), head[8..]);
            let (record, after) = after.split_at(length);
            assert_eq!(masked(record).to_le_bytes(), after[..4]);
            records.push(record.to_vec());
            rest = &after[4..];
        }
        records
    }

    #[test]
    fn the_checksum_is_that_of_the_format() {
        // RFC 3720, B.4: 32 bytes of zeros, and of ones.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c::crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(
            masked(&[0; 32]),
            0x8a91_36aau32.rotate_right(15).wrapping_add(0xa282_ead8)
        );
    }

    #[test]
    fn records_hold_the_fields_of_an_event() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("tensorboard");
        let mut events = EventFile::create(&place, 8).unwrap();
        events.scalars(300, &[("a".to_string(), 1.0)]).unwrap();
        events.text(1, "t", "words").unwrap();
        let records = records(events.path());
        // Field 1 is a double, then field 2, the step.
        let after_time: Vec<&[u8]> = records.iter().map(|record| &record[9..]).collect();
        assert_eq!(records[0][0], 0x09);
        assert_eq!(after_time[0], b"\x10\x00\x1a\x0dbrain.Event:2");
        assert_eq!(after_time[1], b"\x10\x08\x3a\x02\x08\x01");
        assert_eq!(
            after_time[2],
            b"\x10\xac\x02\x2a\x0a\x0a\x08\x0a\x01a\x15\x00\x00\x80\x3f"
        );
        assert_eq!(
            after_time[3],
            b"\x10\x01\x2a\x20\x0a\x1e\x0a\x01t\x4a\x08\x0a\x06\x0a\x04text\
              \x42\x0f\x08\x07\x12\x04\x12\x02\x08\x01\x42\x05words"
        );
    }

    #[test]
    fn files_sort_in_the_order_of_processes_and_a_new_run_has_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("tensorboard");
        let mut paths: Vec<PathBuf> = Vec::new();
        for first in [1, 5, 9] {
            let events = EventFile::create(&place, first).unwrap();
            paths.push(events.path().to_path_buf());
        }
        assert!(paths.is_sorted() && paths[0] != paths[1] && paths[1] != paths[2]);
        EventFile::create(&place, 1).unwrap();
        assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1);
        let aside = dir.path().join("tensorboard.1");
        assert_eq!(std::fs::read_dir(aside).unwrap().count(), 3);
    }
}
