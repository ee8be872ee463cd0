//! Goal: what a run shows is what it did. TensorBoard sees each step once, also after a resume; the
//! report is written of every run, however it ended and whatever its files look like; Prometheus
//! is answered, and no client keeps the run; what cannot be written is said once.
//!
//! Method: the real binary trains a tiny model. Event files are read by the `tensorboard` package
//! where Python has it (`TERRACE_PYTHON`, else python3), and by hand always.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

#[path = "support/machine.rs"]
mod machine;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

const MODEL: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97,
  "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-05, "hidden_act": "silu",
  "max_position_embeddings": 128, "initializer_range": 0.02, "tie_word_embeddings": false,
  "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"
}"#;

/// A directory with a model, rows and a run.toml.
struct Place(TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        place.write("model/config.json", MODEL);
        let rows = (0..40u64).map(|row| {
            let length = 5 + row * 7 % 23;
            let ids: Vec<u64> = (0..length).map(|i| (row * 31 + i * i * 7) % 97).collect();
            format!("{{\"input_ids\": {ids:?}}}\n")
        });
        place.write("rows.jsonl", &rows.collect::<String>());
        place.write(
            "run.toml",
            "[model]\npath = \"model\"\ninit = \"random\"\n\
             [data]\ntrain = \"rows.jsonl\"\neval_split = 4\nseq_len = 32\n\
             [train]\nsteps = 8\nmicro_batches = 2\nlearning_rate = 1e-2\neval_every = 2\n\
             [memory]\ndevice = \"64MiB\"\nhost = \"64MiB\"\n\
             [checkpoint]\nevery = 3\n\
             [log]\ndir = \"log\"\n",
        );
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
        command.current_dir(self.0.path()).stdin(Stdio::null());
        command.args(arguments.split_whitespace());
        if arguments.starts_with("train") {
            command.args(["--device", "cpu"]);
        }
        command
    }

    fn terrace(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Standard output of a success.
    fn succeeds(&self, arguments: &str) -> String {
        let output = self.terrace(arguments);
        assert!(output.status.success(), "{arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Lines of metrics.jsonl.
    fn metrics(&self) -> Vec<Value> {
        let text = self.read("log/metrics.jsonl");
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// (step, value) of a key, in the file's order.
    fn series(&self, key: &str) -> Vec<(u64, f32)> {
        let lines = self.metrics();
        let points = lines
            .iter()
            .filter_map(|line| Some((line["step"].as_u64()?, line[key].as_f64()? as f32)));
        points.collect()
    }

    /// Event files, in the order in which they are read.
    fn event_files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.path("log/tensorboard")).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    }

    fn killed_and_resumed(&self) {
        // The commit of step 6 waits for that of step 3, so one is there.
        let killed = self.terrace("train run.toml --kill-at compute:forward:7");
        assert_eq!(killed.status.code(), None, "{killed:?}");
        self.succeeds("train run.toml --resume");
    }
}

/// Fields of a protobuf message: number and value, as bytes where they have a length.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let length = match key & 7 {
            0 => {
                let value = varint(&mut bytes);
                fields.push((key >> 3, value.to_le_bytes().to_vec()));
                continue;
            }
            1 => 8,
            5 => 4,
            _ => varint(&mut bytes) as usize,
        };
        let (value, rest) = bytes.split_at(length);
        fields.push((key >> 3, value.to_vec()));
        bytes = rest;
    }
    fields
}

fn field(message: &[u8], number: u64) -> Option<Vec<u8>> {
    let mut found = fields(message).into_iter();
    found.find(|(at, _)| *at == number).map(|(_, value)| value)
}

/// Scalars by tag as TensorBoard takes them: a START takes out what was told of its step and later
/// ones. Half a record at the end of a file is left out.
fn scalars(paths: &[PathBuf]) -> BTreeMap<String, Vec<(u64, f32)>> {
    let mut scalars: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for path in paths {
        let bytes = std::fs::read(path).unwrap();
        let mut rest = &bytes[..];
        while rest.len() > 12 {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let Some(event) = rest.get(12..12 + length) else {
                break;
            };
            let step = field(event, 2).unwrap();
            let step = u64::from_le_bytes(step.try_into().unwrap());
            if field(event, 7).is_some() {
                for points in scalars.values_mut() {
                    points.retain(|(at, _)| *at < step);
                }
            }
            for (_, value) in fields(&field(event, 5).unwrap_or_default()) {
                let tag = String::from_utf8(field(&value, 1).unwrap()).unwrap();
                if let Some(number) = field(&value, 2) {
                    let number = f32::from_le_bytes(number.try_into().unwrap());
                    scalars.entry(tag).or_default().push((step, number));
                }
            }
            rest = rest.get(16 + length..).unwrap_or_default();
        }
    }
    scalars
}

/// Python with the `tensorboard` package.
fn python() -> Result<String, String> {
    let python = std::env::var("TERRACE_PYTHON").unwrap_or_else(|_| "python3".to_string());
    let found = Command::new(&python)
        .args(["-c", "import tensorboard"])
        .output();
    match found {
        Ok(output) if output.status.success() => Ok(python),
        _ => Err(format!("{python} has no tensorboard package")),
    }
}

const ACCUMULATE: &str = "\
import json, sys
from tensorboard.backend.event_processing import event_accumulator as of
all = {of.SCALARS: 0, of.TENSORS: 0}
seen = of.EventAccumulator(sys.argv[1], size_guidance=all)
seen.Reload()
scalars = {tag: [(e.step, e.value) for e in seen.Scalars(tag)] for tag in seen.Tags()['scalars']}
texts = {tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in seen.Tensors(tag)]
         for tag in seen.Tags()['tensors']}
print(json.dumps({'scalars': scalars, 'texts': texts}))
";

#[test]
fn tensorboard_sees_each_step_once_after_a_resume() {
    let place = Place::new();
    place.succeeds("train run.toml");
    place.succeeds("train run.toml --resume=6");
    let paths = place.event_files();
    assert_eq!(paths.len(), 2);
    let seen = scalars(&paths);
    let keys = [
        ("train/loss", "loss"),
        ("train/grad_norm", "grad_norm"),
        ("train/learning_rate", "learning_rate"),
        ("eval/loss", "eval_loss"),
        ("speed/tokens_per_second", "tokens_per_second"),
    ];
    for (tag, key) in keys {
        assert_eq!(seen[tag], place.series(key), "{tag}");
    }
    assert_eq!(seen["train/loss"].len(), 8);
    assert_eq!(seen["speed/tflops"].len(), 8);
    // Each file has the steps that were done twice.
    assert_eq!(scalars(&paths[..1])["train/loss"].len(), 8);
    assert_eq!(scalars(&paths[1..])["train/loss"].len(), 2);

    let python = match python() {
        Ok(python) => python,
        Err(reason) => return machine::skip("tensorboard reads event files", &reason),
    };
    let accumulated = Command::new(python)
        .args(["-c", ACCUMULATE])
        .arg(place.path("log/tensorboard"))
        .output()
        .unwrap();
    assert!(accumulated.status.success(), "{accumulated:?}");
    let accumulated: Value = serde_json::from_slice(&accumulated.stdout).unwrap();
    for (tag, key) in keys {
        let points = accumulated["scalars"][tag].as_array().unwrap().iter();
        let points = points.map(|point| {
            let value = point[1].as_f64().unwrap() as f32;
            (point[0].as_u64().unwrap(), value)
        });
        assert_eq!(points.collect::<Vec<_>>(), place.series(key), "{tag}");
    }
    let config = &accumulated["texts"]["config"];
    assert_eq!(config[0][0], 0);
    let text = config[0][1].as_str().unwrap();
    assert!(text.contains("\nlearning_rate = 0.01\n"), "{text}");
}

/// (step, tag, plugin, text) of the texts of event files.
fn texts(paths: &[PathBuf]) -> Vec<(u64, String, String, String)> {
    let mut texts = Vec::new();
    for path in paths {
        let bytes = std::fs::read(path).unwrap();
        let mut rest = &bytes[..];
        while rest.len() > 12 {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let event = &rest[12..12 + length];
            let step = u64::from_le_bytes(field(event, 2).unwrap().try_into().unwrap());
            for (_, value) in fields(&field(event, 5).unwrap_or_default()) {
                let text = |bytes: Option<Vec<u8>>| String::from_utf8(bytes.unwrap()).unwrap();
                if let Some(tensor) = field(&value, 8) {
                    let about = field(&field(&value, 9).unwrap(), 1).unwrap();
                    let plugin = text(field(&about, 1));
                    texts.push((
                        step,
                        text(field(&value, 1)),
                        plugin,
                        text(field(&tensor, 8)),
                    ));
                }
            }
            rest = &rest[16 + length..];
        }
    }
    texts
}

#[test]
fn samples_are_texts_of_tensorboard() {
    let place = Place::new();
    place.succeeds(
        "train --quickstart log --set data.seq_len=32 --set train.micro_batch=1 \
         --set train.warmup_steps=0 --set train.steps=2 --set train.eval_every=0 \
         --set checkpoint.every=0 --set log.sample_every=1 --set log.sample_tokens=4 \
         --set log.sample_prompts=[\"In\\nthe\",\"And\"]",
    );
    let samples = place.read("log/samples.jsonl");
    let told = samples.lines().map(|line| {
        let line: Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| line[key].as_str().unwrap();
        // As Markdown leaves it alone.
        let shown = format!("{}⟶{}", text("prompt"), text("sample"));
        let shown = format!("    {}", shown.replace(['\n', '\r'], "\n    "));
        let step = line["step"].as_u64().unwrap();
        (step, "samples".to_string(), "text".to_string(), shown)
    });
    let told: Vec<_> = told.collect();
    assert_eq!(told.len(), 4);
    let texts = texts(&place.event_files()).into_iter();
    let texts: Vec<_> = texts.filter(|(_, tag, ..)| tag == "samples").collect();
    assert_eq!(texts, told);
}

#[test]
fn a_run_from_the_beginning_has_event_files_of_its_own() {
    let place = Place::new();
    place.succeeds("train run.toml --set train.steps=2 --set checkpoint.every=0");
    place.succeeds("train run.toml --set train.steps=3 --set checkpoint.every=0");
    assert_eq!(scalars(&place.event_files())["train/loss"].len(), 3);
    assert!(place.path("log/tensorboard.1").is_dir());
    place.succeeds(
        "train run.toml --set train.steps=2 --set checkpoint.every=0 --set log.tensorboard=false",
    );
    assert!(place.path("log/tensorboard.1").is_dir());
    assert_eq!(place.event_files().len(), 1);
}

/// A page that is whole and names no other place.
fn assert_page(html: &str) {
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
    for outside in ["http:", "https:", "<script", "<link", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
    for (start, _) in html.match_indices("<svg ") {
        let svg = &html[start..start + html[start..].find("</svg>").unwrap()];
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}

#[test]
fn the_report_is_written_however_a_run_ends() {
    let place = Place::new();
    place.killed_and_resumed();
    let html = place.read("log/report.html");
    assert_page(&html);
    for words in [
        "finished",
        "<td>8 of 8</td>",
        "Resumed 1 times, after step",
        "aria-label=\"Loss\"",
        "aria-label=\"Learning rate\"",
        "aria-label=\"Gradient norm, before clipping\"",
        "aria-label=\"Tokens a second\"",
        "held-out",
        "What each tier holds",
        "Seconds of a step",
        "<td>promote</td>",
        "compute: weights",
        "<h2>Commits</h2>",
        "<h2>Written to drives</h2>",
        "learning_rate = 0.01",
    ] {
        assert!(html.contains(words), "{words}");
    }

    let place = Place::new();
    let failed = place.terrace("train run.toml --set train.learning_rate=1e30");
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");
    let html = place.read("log/report.html");
    assert_page(&html);
    assert!(
        html.contains("failed: ") && html.contains(" is NaN"),
        "{html}"
    );
    let status: Value = serde_json::from_str(&place.read("log/status.json")).unwrap();
    assert_eq!(status["state"], "failed");
}

#[test]
fn the_report_is_made_of_what_is_there() {
    let place = Place::new();
    let refused = place.terrace("report nowhere");
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let words = String::from_utf8(refused.stderr).unwrap();
    assert!(words.starts_with("terrace: run: nowhere: expected the directory of a run"));
    assert!(
        words.ends_with("got no directory; name that directory\n"),
        "{words}"
    );

    // metrics.jsonl alone, as a copy or an older version has it: repeated steps, no numbers, other
    // bytes, half a line.
    let step = |at: u64, loss: &str| {
        format!("{{\"step\":{at},\"loss\":{loss},\"tokens\":64,\"step_seconds\":0.5}}\n")
    };
    let mut text: String = (1..=100_000).map(|at| step(at, "2.5")).collect();
    text += &step(99_990, "null");
    text += "{\"step\":99990,\"eval_loss\":null}\n\u{fffd}\n[]\n{\"step\":99991,\"lo";
    place.write("old/metrics.jsonl", &text);
    let sample = "{\"step\":7,\"prompt\":\"<b>\",\"sample\":\"a & b\\nc\"}\nnot a line\n";
    place.write("old/samples.jsonl", sample);
    let said = place.succeeds("report old --output page.html");
    assert_eq!(said, "report: page.html\n");
    let html = place.read("page.html");
    assert_page(&html);
    assert!(html.len() < 400_000, "{}", html.len());
    for words in [
        "11 steps were told twice",
        "1 steps have a loss that is no number",
        "2 lines of metrics.jsonl could not be read",
        "step 7: &lt;b&gt;",
        "a &amp; b\nc",
    ] {
        assert!(html.contains(words), "{words}");
    }
    assert!(!place.path("old/report.html").exists());

    place.write("begun/run.json", "{\"config\":\"[train]\\n\"}");
    place.succeeds("report begun");
    let html = place.read("begun/report.html");
    assert_page(&html);
    assert!(html.contains("No step was done."));
}

#[test]
fn charts_are_written_as_files_of_their_own() {
    let place = Place::new();
    place.succeeds("train run.toml");
    let said = place.succeeds("report log --svg charts");
    let expected = "charts: loss.svg, learning_rate.svg, gradient_norm.svg, \
                    tokens_per_second.svg, plan.svg, hops.svg, stalls.svg\n";
    assert_eq!(said, expected);
    for name in said.trim().trim_start_matches("charts: ").split(", ") {
        let svg = place.read(&format!("charts/{name}"));
        assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
        assert!(svg.contains("<style>") && svg.trim_end().ends_with("</svg>"));
    }
}

/// A run that goes on until it is told to end.
struct Running {
    child: Child,
    /// Host and port.
    address: String,
}

impl Running {
    fn start(place: &Place) -> Running {
        let arguments = "train run.toml --set train.steps=100000000 --set log.prometheus=0 \
                         --set checkpoint.every=0 --set train.eval_every=0";
        let mut child = place
            .command(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = loop {
            let line = lines
                .next()
                .expect("the run says where it answers")
                .unwrap();
            if let Some(rest) = line.strip_prefix("prometheus: http://") {
                break rest.trim_end_matches("/metrics").to_string();
            }
        };
        std::thread::spawn(move || lines.for_each(drop));
        Running { child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        stream
    }

    fn ask(&self, request: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn metrics(&self) -> String {
        self.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    }

    fn value(&self, name: &str) -> f64 {
        let text = self.metrics();
        let line = text.lines().find(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(' '))
        });
        let line = line.unwrap_or_else(|| panic!("{name} is not in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until the run has done more steps than it has now.
    fn goes_on(&self) {
        let before = self.value("terrace_step");
        let on = || self.value("terrace_step") > before;
        machine::wait_for("a step", on).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[test]
fn prometheus_is_answered_and_no_client_keeps_the_run() {
    let place = Place::new();
    let mut running = Running::start(&place);
    machine::wait_for("a step", || {
        running.metrics().contains("\nterrace_loss_nats ")
    })
    .unwrap();
    let answer = running.metrics();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())));
    // Each metric has its help and type before its samples, once.
    let mut metric = String::new();
    let mut seen = Vec::new();
    for line in body.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            metric = rest.split(' ').next().unwrap().to_string();
            assert!(!seen.contains(&metric), "{metric}");
            seen.push(metric.clone());
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(name, metric);
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
        } else {
            let name = line.split(['{', ' ']).next().unwrap();
            assert_eq!(name, metric);
            let value = line.rsplit(' ').next().unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
    }
    assert!(body.contains("terrace_hop_bytes_total{hop=\"promote\"} "));
    assert!(body.contains("terrace_tier_budget_bytes{tier=\"host\"} 67108864\n"));

    for (request, status) in [
        ("GET / HTTP/1.0\r\n\r\n", "404 Not Found"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        ("HEAD /metrics HTTP/1.1\r\n\r\n", "200 OK"),
    ] {
        let answer = running.ask(request);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}\r\n")),
            "{answer}"
        );
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        assert_eq!(body.is_empty(), request.starts_with("HEAD"), "{answer}");
    }
    // Silent, too long, gone: each costs the next client two seconds at most, and the run nothing.
    let silent: Vec<TcpStream> = (0..2).map(|_| running.connect()).collect();
    let mut long = running.connect();
    long.write_all(&vec![b'x'; 1 << 20]).ok();
    drop(running.connect());
    running.goes_on();
    drop((silent, long));

    let report = place.path("log/report.html");
    assert!(!report.exists());
    Command::new("kill")
        .args(["-INT", &running.child.id().to_string()])
        .status()
        .unwrap();
    let ended = running.child.wait().unwrap();
    assert_eq!(ended.code(), Some(130));
    assert!(report.exists());
    let status: Value = serde_json::from_str(&place.read("log/status.json")).unwrap();
    assert_eq!(status["state"], "interrupted");
}

#[test]
fn the_status_tells_where_the_lanes_are() {
    let place = Place::new();
    let running = Running::start(&place);
    running.goes_on();
    let began = Instant::now();
    let status = loop {
        let status: Value = serde_json::from_str(&place.read("log/status.json")).unwrap();
        // Between two actions, not only before the first.
        let lane = &status["lanes"][0];
        if lane["lane"] == "compute" && lane["done"].as_u64() > Some(0) {
            break status;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{status}");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(status["state"], "running");
    assert_eq!(status["doing"], "training");
    assert_eq!(status["pid"], running.child.id());
    let lane = &status["lanes"][0];
    assert!(lane["of"].as_u64() > Some(10), "{status}");
    assert!(lane["done"].as_u64() <= lane["of"].as_u64(), "{status}");
    let is_done = lane["done"] == lane["of"];
    assert_eq!(lane["action"] == "", is_done, "{status}");
    assert!(status["resident_bytes"].as_u64() > Some(1 << 20));
}

#[test]
fn what_cannot_be_shown_is_said_once_and_the_run_goes_on() {
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    place.write("log/tensorboard", "not a directory");
    std::fs::create_dir_all(place.path("log/status.json")).unwrap();
    std::fs::create_dir_all(place.path("log/report.html/x")).unwrap();
    let said = place.succeeds(&format!("train run.toml --set log.prometheus={port}"));
    let warnings: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with("warning: "))
        .collect();
    let [events, address, status, report] = warnings[..] else {
        panic!("{said}");
    };
    assert!(events.starts_with("warning: log/tensorboard: "), "{events}");
    let expected = format!("warning: log.prometheus 127.0.0.1:{port}: Address already in use");
    assert!(address.starts_with(&expected), "{address}");
    assert!(status.starts_with("warning: log/status.json: "), "{status}");
    assert!(report.ends_with("the run has no report"), "{report}");
    assert_eq!(place.series("loss").len(), 8);
}
