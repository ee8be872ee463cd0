//! Goal: what a build has only with its features works: models fetched by their hub name into the
//! cache's own layout, and rows of .parquet files.
//!
//! Method: the real binary; a hub of the test's own on loopback, which serves the quickstart's
//! model and counts what is asked for. `cargo test --features hub,parquet --test features`.

#![cfg(all(feature = "hub", feature = "parquet"))]
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use parquet::data_type::ByteArrayType;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Files of a repository, and the requests for them so far.
struct Hub {
    address: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn serve(files: Vec<(String, Vec<u8>)>) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (files, seen) = (files.clone(), seen.clone());
                std::thread::spawn(
                    move || while answer(stream.as_ref().unwrap(), &files, &seen) {},
                );
            }
        });
        Hub { address, asked }
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

/// Answers one request; false where there is no further one.
fn answer(mut stream: &TcpStream, files: &[(String, Vec<u8>)], seen: &Mutex<Vec<String>>) -> bool {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    if reader.read_line(&mut line).unwrap_or(0) == 0 {
        return false;
    }
    let target = line.split(' ').nth(1).unwrap().to_string();
    let mut first = 0;
    let mut last = usize::MAX;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).unwrap();
        let header = header.trim().to_ascii_lowercase();
        if let Some(range) = header.strip_prefix("range: bytes=") {
            let (from, to) = range.split_once('-').unwrap();
            first = from.parse().unwrap();
            last = to.parse().unwrap_or(usize::MAX);
        }
        if header.is_empty() {
            break;
        }
    }
    seen.lock().unwrap().push(target.clone());
    let names: Vec<_> = files
        .iter()
        .map(|(name, _)| json!({"rfilename": name}))
        .collect();
    let described = json!({"siblings": names, "sha": COMMIT})
        .to_string()
        .into_bytes();
    let body = if target.starts_with("/api/models/org/small") {
        Some(("described", &described))
    } else {
        let name = target.rsplit('/').next().unwrap();
        let found = files.iter().find(|(of, _)| of == name);
        found
            .filter(|_| target.starts_with("/org/small/resolve/"))
            .map(|(name, b)| (name.as_str(), b))
    };
    let Some((name, body)) = body else {
        let text = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
        return stream.write_all(text.as_bytes()).is_ok();
    };
    let part = &body[first.min(body.len())..last.saturating_add(1).min(body.len())];
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\ncontent-length: {}\r\ncontent-range: bytes {first}-{}/{}\r\n\
         etag: \"{name}\"\r\nx-repo-commit: {COMMIT}\r\ncontent-type: application/json\r\n\r\n",
        part.len(),
        first + part.len().max(1) - 1,
        body.len()
    );
    stream
        .write_all(head.as_bytes())
        .and_then(|()| stream.write_all(part))
        .is_ok()
}

fn terrace(room: &Path, endpoint: &str, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_terrace"))
        .args(arguments)
        .current_dir(room)
        .env("HF_HOME", room.join("hf"))
        .env("HF_ENDPOINT", endpoint)
        .env_remove("HF_HUB_OFFLINE")
        .env_remove("HF_TOKEN")
        .output()
        .unwrap()
}

fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The quickstart's model after a step, as an export: configuration, tokenizer, weights.
fn small_model(room: &Path) -> Vec<(String, Vec<u8>)> {
    let steps = [
        "train",
        "--quickstart",
        "q",
        "--device",
        "cpu",
        "--set",
        "train.steps=1",
    ];
    let trained = terrace(room, "", &steps);
    assert!(trained.status.success(), "{}", error(&trained));
    let exported = terrace(
        room,
        "",
        &["export", "--checkpoint", "q/checkpoint", "--out", "model"],
    );
    assert!(exported.status.success(), "{}", error(&exported));
    let files = std::fs::read_dir(room.join("model")).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        (name, std::fs::read(&path).unwrap())
    });
    files.collect()
}

const RUN: &str = r#"
[model]
path = "org/small"
[data]
train = "rows.parquet"
seq_len = 32
[train]
steps = 1
micro_batch = 1
micro_batches = 1
[memory]
device = "256MiB"
host = "256MiB"
[checkpoint]
every = 0
[log]
dir = "run"
"#;

/// A file with a column of texts.
fn write_rows(path: &Path, texts: &[&str]) {
    let schema = parse_message_type("message row { required binary text (UTF8); }").unwrap();
    let file = std::fs::File::create(path).unwrap();
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer = SerializedFileWriter::new(file, Arc::new(schema), properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let values: Vec<_> = texts.iter().map(|text| (*text).into()).collect();
    column
        .typed::<ByteArrayType>()
        .write_batch(&values, None, None)
        .unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn a_model_is_fetched_by_its_name_and_trained_on_parquet() {
    let room = tempfile::tempdir().unwrap();
    let room = room.path();
    let mut files = small_model(room);
    files.push(("../escape.json".to_string(), b"{}".to_vec()));
    files.push(("onnx/model.onnx".to_string(), vec![0; 100]));
    let hub = Hub::serve(files);
    std::fs::write(room.join("run.toml"), RUN).unwrap();
    let text = "In the beginning God created the heaven and the earth. And the earth was waste.";
    write_rows(&room.join("rows.parquet"), &[text, text, text]);

    // A plan and a preview need no weights.
    let preview = terrace(room, &hub.address, &["data", "preview", "run.toml"]);
    assert!(preview.status.success(), "{}", error(&preview));
    let shown = String::from_utf8_lossy(&preview.stdout).into_owned();
    assert!(shown.contains("heaven"), "{shown}");
    let asked = hub.asked();
    assert!(
        asked.iter().any(|target| target.ends_with("/config.json")),
        "{asked:?}"
    );
    assert!(
        !asked.iter().any(|target| target.ends_with(".safetensors")),
        "{asked:?}"
    );

    let train = ["train", "run.toml", "--device", "cpu"];
    let trained = terrace(room, &hub.address, &train);
    assert!(trained.status.success(), "{}", error(&trained));
    let asked = hub.asked();
    assert!(
        asked
            .iter()
            .any(|target| target.ends_with("/model.safetensors")),
        "{asked:?}"
    );
    assert!(
        !asked
            .iter()
            .any(|target| target.contains("escape") || target.contains("onnx"))
    );
    let snapshot = room
        .join("hf/hub/models--org--small/snapshots")
        .join(COMMIT);
    assert!(snapshot.join("model.safetensors").exists());

    // What is whole is not asked for again, with or without a hub.
    assert!(terrace(room, &hub.address, &train).status.success());
    assert_eq!(hub.asked(), Vec::<String>::new());
    let other = terrace(
        room,
        &hub.address,
        &["train", "run.toml", "--set", "model.path=org/none"],
    );
    assert_eq!(other.status.code(), Some(2));
    assert!(
        error(&other).contains("org/none: expected a model on the hub"),
        "{}",
        error(&other)
    );
    assert_eq!(error(&other).lines().count(), 1);
}
