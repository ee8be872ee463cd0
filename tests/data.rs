//! Goal: rows become the tokens and the mask that transformers makes; every broken input is one
//! clear line; every token comes once an epoch, and a cursor resumes exactly.
//! Method: goldens by transformers (`golden/make_data.py`), a table of bad inputs with their whole
//! messages, and properties on random rows.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;
use terrace::config::{DataConfig, DataFormat, RunConfig};
use terrace::data::preview::{PreviewOptions, preview};
use terrace::data::templates::ChatTemplate;
use terrace::data::{
    Batches, Cursor, Dataset, IGNORE, Micro, TextTokenizer, eval_micros, quickstart, sorted_tokens,
};

const FILES: [&str; 6] = [
    "identity.json",
    "sharegpt.json",
    "messages.jsonl",
    "parts.jsonl",
    "thinking.jsonl",
    "questions.jsonl",
];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/data")
}

fn config(seq_len: u64) -> DataConfig {
    DataConfig {
        seq_len,
        ..RunConfig::default().data
    }
}

/// The quickstart tokenizer with another chat template, or none.
fn with_template(template: Option<&str>) -> TextTokenizer {
    let [(_, json), (_, settings)] = quickstart::tokenizer_files();
    let mut settings: Value = serde_json::from_slice(settings).unwrap();
    settings["chat_template"] = template.into();
    TextTokenizer::from_bytes(json, settings.to_string().as_bytes()).unwrap()
}

/// FNV-1a, 64 bits, over little-endian u32.
fn fnv(numbers: &[u32]) -> String {
    let mut value = 0xcbf2_9ce4_8422_2325u64;
    for byte in numbers.iter().flat_map(|number| number.to_le_bytes()) {
        value = (value ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    format!("{value:016x}")
}

fn compare_with_golden(case: &str, tokenizer: &TextTokenizer) {
    let golden: Value =
        serde_json::from_slice(&std::fs::read(fixtures().join("golden.json")).unwrap()).unwrap();
    for file in FILES {
        let rows = golden[case][file].as_array().unwrap();
        let dataset = Dataset::load(
            &[fixtures().join(file)],
            &config(8192),
            Some(tokenizer),
            tokenizer.ids_end(),
        )
        .unwrap();
        assert_eq!(dataset.rows() as usize, rows.len(), "{case} {file}");
        for (row, golden) in (0..dataset.rows()).zip(rows) {
            let ids = dataset.row(row);
            let mask: Vec<u32> = (0..ids.len())
                .map(|at| u32::from(dataset.is_trained(row, at)))
                .collect();
            let text = tokenizer.decode(ids, false).unwrap();
            if let Some(full) = golden.get("full") {
                assert_eq!(text, full["text"], "{case} {file} row {row}");
                let full_ids: Vec<u64> = full["ids"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .filter_map(Value::as_u64)
                    .collect();
                assert_eq!(
                    ids.iter().map(|&id| u64::from(id)).collect::<Vec<_>>(),
                    full_ids,
                    "{case} {file}"
                );
                let marks: String = mask.iter().map(u32::to_string).collect();
                assert_eq!(marks, full["mask"], "{case} {file} row {row}");
            }
            assert_eq!(
                ids.len() as u64,
                golden["count"],
                "{case} {file} row {row}: {text}"
            );
            assert_eq!(fnv(ids), golden["ids"], "{case} {file} row {row}: {text}");
            assert_eq!(
                mask.iter().sum::<u32>(),
                golden["trained"],
                "{case} {file} row {row}: {text}"
            );
            assert_eq!(
                fnv(&mask),
                golden["mask"],
                "{case} {file} row {row}: {text}"
            );
        }
    }
}

#[test]
fn templates_equal_transformers() {
    compare_with_golden("quickstart", &quickstart::tokenizer().unwrap());
    for name in ["smollm2", "qwen3"] {
        let source = std::fs::read_to_string(fixtures().join(format!("{name}.jinja"))).unwrap();
        compare_with_golden(name, &with_template(Some(&source)));
    }
}

/// The folder of real models: `$TERRACE_MATERIAL`, or `material` in the repository.
fn material() -> Option<PathBuf> {
    let named = std::env::var_os("TERRACE_MATERIAL").map(PathBuf::from);
    let folder = named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("material"));
    if folder.join("qwen3-tokenizer/tokenizer.json").is_file() {
        return Some(folder);
    }
    println!("SKIP: no real tokenizers: set TERRACE_MATERIAL to the folder that prepare.py made");
    None
}

#[test]
fn real_tokenizers_equal_transformers() {
    let Some(material) = material() else { return };
    for (case, folder, vocab) in [
        ("smollm2-own", "smollm2-135m-instruct", 49_152),
        ("qwen3-own", "qwen3-tokenizer", 151_936),
    ] {
        let tokenizer = TextTokenizer::load(&material.join(folder), vocab).unwrap();
        compare_with_golden(case, &tokenizer);
    }
}

#[test]
fn a_long_text_in_pieces_equals_the_whole() {
    let tokenizer = quickstart::tokenizer().unwrap();
    let whole = tokenizer.encode(quickstart::text(), true).unwrap();
    let dataset =
        Dataset::from_text("text", quickstart::text(), &config(1000), &tokenizer).unwrap();
    let rows: Vec<u32> = (0..dataset.rows())
        .flat_map(|row| dataset.row(row).to_vec())
        .collect();
    assert_eq!(rows[..whole.len()], whole);
    assert_eq!(rows[whole.len()..], [tokenizer.eos().unwrap()]);
    assert!((0..dataset.rows() - 1).all(|row| dataset.row_len(row) == 1000));
    // A tokenizer that writes a mark before each text must not do so before each piece.
    let json = r#"{"version":"1.0","added_tokens":[],"normalizer":{"type":"Prepend","prepend":"_"},
        "pre_tokenizer":null,"post_processor":null,"decoder":null,
        "model":{"type":"BPE","vocab":{"a":0,"\n":1,"_":2},"merges":[]}}"#;
    let marking = TextTokenizer::from_bytes(json.as_bytes(), b"{}").unwrap();
    let text = "aaa\n".repeat(40_000);
    let dataset = Dataset::from_text("text", &text, &config(1 << 20), &marking).unwrap();
    assert_eq!(dataset.row(0), marking.encode(&text, true).unwrap());
    assert_eq!(dataset.row(0).iter().filter(|&&id| id == 2).count(), 1);
}

#[test]
fn real_texts_in_pieces_equal_the_whole() {
    let Some(material) = material() else { return };
    let text = std::fs::read_to_string(material.join("kjv.txt")).unwrap();
    for (folder, tokens) in [
        ("smollm2-135m-instruct", 1_030_266),
        ("qwen3-tokenizer", 1_003_586),
        ("mistral-tokenizer", 1_111_880),
    ] {
        let tokenizer = TextTokenizer::load(&material.join(folder), 1 << 20).unwrap();
        let clock = std::time::Instant::now();
        let dataset = Dataset::from_text("kjv", &text, &config(1 << 24), &tokenizer).unwrap();
        let rate = text.len() as f64 / clock.elapsed().as_secs_f64() / 1e6;
        println!("{folder}: {rate:.2} MB/s");
        let ids = dataset.row(0);
        assert_eq!(ids[..ids.len() - 1], tokenizer.encode(&text, true).unwrap());
        assert_eq!(ids.len() - 1, tokens, "{folder}");
    }
}

/// Loads one file of this content with the quickstart tokenizer; paths in errors read FILE.
fn load_bytes(name: &str, content: &[u8], config: &DataConfig) -> Result<Dataset, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    let tokenizer = quickstart::tokenizer().unwrap();
    load_path(&path, config, Some(&tokenizer))
}

fn load_path(
    path: &Path,
    config: &DataConfig,
    tokenizer: Option<&TextTokenizer>,
) -> Result<Dataset, String> {
    Dataset::load(&[path.to_path_buf()], config, tokenizer, 1024).map_err(|error| {
        assert!(matches!(error.exit_code(), 2 | 4), "{error}");
        let message = error.to_string().replace(path.to_str().unwrap(), "FILE");
        assert!(!message.contains('\n'), "{message}");
        message
    })
}

/// Small bad files are in `bad_rows.json`, each byte a character; large ones are made here.
#[test]
fn bad_rows_are_named() {
    let table = std::fs::read(fixtures().join("bad_rows.json")).unwrap();
    let table: Vec<Value> = serde_json::from_slice(&table).unwrap();
    assert!(table.len() > 30);
    for case in table {
        let text = |key: &str| case[key].as_str().unwrap();
        let bytes: Vec<u8> = text("content")
            .chars()
            .map(|c| u8::try_from(c).unwrap())
            .collect();
        let got = load_bytes(text("file"), &bytes, &config(64)).map(|dataset| dataset.stats());
        assert_eq!(got, Err(text("error").to_string()));
    }
    let load =
        |content: String| load_bytes("a.jsonl", content.as_bytes(), &config(64)).unwrap_err();
    let (open, close) = ("[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(
        load(format!("{{\"text\": {open}1{close}}}")),
        "dataset: FILE:1: expected a JSON object a line, got recursion limit exceeded at column \
         136; \
         write each row on one line, or the file as one list […]"
    );
    let words = "a b ".repeat(100);
    assert_eq!(
        load(format!(
            "{{\"prompt\": \"{words}\", \"completion\": \"b\"}}"
        )),
        "dataset: FILE:1: expected at most 64 tokens, data.seq_len, got 216 tokens; \
         set data.truncate = true to cut it, or raise data.seq_len"
    );
    let turns = vec!["{\"role\": \"assistant\", \"content\": \"a\"}"; 1025].join(",");
    assert_eq!(
        load(format!("{{\"messages\": [{turns}]}}")),
        "dataset: FILE:1: expected at most 1024 turns in a conversation, got 1025 turns; \
         split it into several rows"
    );
}

#[test]
fn bad_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = quickstart::tokenizer().unwrap();
    let load =
        |path: &Path| load_path(path, &config(64), Some(&tokenizer)).map(|dataset| dataset.stats());
    assert_eq!(
        load(folder.path()),
        Err("dataset: FILE: expected a file, got a directory; name the files themselves".into())
    );
    let missing = load(&folder.path().join("none.jsonl"));
    assert_eq!(
        missing,
        Err("open: FILE: No such file or directory (os error 2)".into())
    );
    // Sparse files: nothing of their size is written.
    let sparse = |name: &str, first: &[u8], bytes: u64| {
        let path = folder.path().join(name);
        std::fs::write(&path, first).unwrap();
        std::fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(bytes)
            .unwrap();
        load(&path)
    };
    let line = "dataset: FILE:1: expected a line of at most 67108864 bytes, got a longer one; \
     write a row a line";
    assert_eq!(sparse("line.jsonl", b"{", 10 << 30), Err(line.into()));
    let list = "dataset: FILE: expected at most 1073741824 bytes, got 10737418240 bytes; write \
     it as JSON lines";
    assert_eq!(sparse("list.json", b"[", 10 << 30), Err(list.into()));
    let text = "dataset: FILE: expected at most 1073741824 bytes, got 10737418240 bytes; \
        cut it, or write rows of `text` as JSON lines";
    assert_eq!(sparse("text.txt", b"a", 10 << 30), Err(text.into()));
}

#[test]
fn odd_files_are_read() {
    let tokenizer = quickstart::tokenizer().unwrap();
    let text = |dataset: &Dataset, row| tokenizer.decode(dataset.row(row), false).unwrap();
    let marked = b"\xef\xbb\xbf\r\n{\"text\": \"a\"}\r\n\r\n  \n{\"text\": \"\"}\n{\"text\": \
     \"b\", \"id\": 3}";
    let dataset = load_bytes("a.jsonl", marked, &config(64)).unwrap();
    assert_eq!((dataset.rows(), dataset.stats().left_out), (2, 1));
    assert_eq!(
        [text(&dataset, 0), text(&dataset, 1)],
        ["a<|endoftext|>", "b<|endoftext|>"]
    );
    assert!(dataset.place(1).ends_with("a.jsonl:6"));
    let list = load_bytes(
        "a.jsonl",
        b" \n[{\"text\": \"a\"},\n{\"text\": \"b\"}]\n",
        &config(64),
    )
    .unwrap();
    assert_eq!(
        (0..2).map(|row| text(&list, row)).collect::<Vec<_>>(),
        ["a<|endoftext|>", "b<|endoftext|>"]
    );
    let crlf = load_bytes("a.txt", b"\xef\xbb\xbfa\r\nb", &config(64)).unwrap();
    assert_eq!(text(&crlf, 0), "a\r\nb<|endoftext|>");
    let truncate = DataConfig {
        truncate: true,
        ..config(4)
    };
    let cut = load_bytes("a.jsonl", br#"{"input_ids": [1, 2, 3, 4, 5]}"#, &truncate).unwrap();
    assert_eq!((cut.row(0), cut.stats().truncated), (&[1, 2, 3, 4][..], 1));
    let five = b"{\"input_ids\": [1, 2, 3, 4, 5]}";
    assert_eq!(
        load_bytes("a.jsonl", five, &config(5))
            .unwrap()
            .stats()
            .longest,
        5
    );
    assert!(
        load_bytes("a.jsonl", five, &config(4))
            .unwrap_err()
            .contains("got 5 tokens")
    );
    let padded = br#"{"input_ids": [7, 8, 9, 0], "labels": [-100, 8, 9, 0],
        "attention_mask": [1, 1, 1, 0]}"#;
    let padded = String::from_utf8_lossy(padded).replace('\n', "");
    let padded = load_bytes("a.jsonl", padded.as_bytes(), &config(4)).unwrap();
    assert_eq!(padded.row(0), [7, 8, 9]);
    let micros = eval_micros(&padded, &config(4), 1);
    assert_eq!(micros[0].targets, [8, 9, IGNORE]);
}

#[test]
fn formats_say_the_same() {
    let same = std::fs::read_to_string(fixtures().join("same.jsonl")).unwrap();
    let same: Vec<&[u8]> = same.lines().map(str::as_bytes).collect();
    assert_eq!(same.len(), 6);
    let fingerprints: Vec<u128> = same
        .iter()
        .map(|row| {
            load_bytes("a.jsonl", row, &config(64))
                .unwrap()
                .fingerprint()
        })
        .collect();
    assert!(
        fingerprints.iter().all(|&print| print == fingerprints[0]),
        "{fingerprints:?}"
    );
    let history = br#"{"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}"#;
    let messages = br#"{"messages": [{"role": "system", "content": "s"},
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#;
    let messages = String::from_utf8_lossy(messages).replace('\n', "");
    let messages = messages.as_bytes();
    let of = |row: &[u8]| {
        load_bytes("a.jsonl", row, &config(64))
            .unwrap()
            .fingerprint()
    };
    assert_eq!(of(history), of(messages));
    let unweighted = String::from_utf8_lossy(messages)
        .replace("\"content\": \"b\"", "\"content\": \"b\", \"train\": false");
    let fewer = load_bytes("a.jsonl", unweighted.as_bytes(), &config(64)).unwrap();
    assert_eq!(
        fewer.stats().targets + 3,
        load_bytes("a.jsonl", messages, &config(64))
            .unwrap()
            .stats()
            .targets
    );
    let named = DataConfig {
        format: DataFormat::Text,
        ..config(64)
    };
    let both = br#"{"text": "a", "input_ids": [5, 6, 7]}"#;
    assert_eq!(
        load_bytes("a.jsonl", both, &named).unwrap().stats().tokens,
        2
    );
    assert_eq!(
        load_bytes("a.jsonl", both, &config(64))
            .unwrap()
            .stats()
            .tokens,
        3
    );
}

#[test]
fn no_template_and_no_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let plain = with_template(None);
    let messages = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}";
    std::fs::write(&path, messages).unwrap();
    assert_eq!(
        load_path(&path, &config(64), Some(&plain)).unwrap_err(),
        "dataset: FILE:1: expected a chat template for a conversation, got a tokenizer without \
         one; \
         put chat_template.jinja beside tokenizer.json, or give rows of prompt and completion"
    );
    assert_eq!(
        load_path(&path, &config(64), None).unwrap_err(),
        "dataset: FILE:1: expected `input_ids`, as the model has no tokenizer, got a row of text; \
         put tokenizer.json into the model's directory"
    );
    std::fs::write(&path, "{\"prompt\": \"Who \", \"completion\": \"begat\"}").unwrap();
    let dataset = load_path(&path, &config(64), Some(&plain)).unwrap();
    assert_eq!(
        plain.decode(dataset.row(0), false).unwrap(),
        "Who begat<|endoftext|>"
    );
    let trained: Vec<u32> = (0..dataset.row(0).len())
        .filter(|&at| dataset.is_trained(0, at))
        .map(|at| dataset.row(0)[at])
        .collect();
    // The space is of the prompt, and the token " beg…" begins there.
    assert!("begat<|endoftext|>".ends_with(&plain.decode(&trained, false).unwrap()));
    assert!(trained.contains(&plain.eos().unwrap()));
    std::fs::write(&path, "{\"input_ids\": [1, 2, 3]}").unwrap();
    assert_eq!(
        load_path(&path, &config(64), None).unwrap().stats().targets,
        2
    );
}

#[test]
fn bad_tokenizers_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_str().unwrap().to_string();
    let load = |vocab| {
        let message = TextTokenizer::load(folder.path(), vocab)
            .map(|_| ())
            .unwrap_err()
            .to_string();
        assert!(!message.contains('\n'), "{message}");
        message.replace(&place, "DIR")
    };
    assert_eq!(
        load(1024),
        "tokenizer: DIR: expected tokenizer.json, got a directory without one; \
         copy it from the model's repository, or give rows of `input_ids`"
    );
    let [(_, json), (_, settings)] = quickstart::tokenizer_files();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("tokenizer.json", b"{}");
    assert!(load(1024).starts_with(
        "tokenizer: DIR/tokenizer.json: expected a tokenizer of the tokenizers library, got "
    ));
    write("tokenizer.json", json);
    write("tokenizer_config.json", settings);
    assert_eq!(
        load(1000),
        "tokenizer: DIR/tokenizer.json: expected ids below 1000, the model's vocabulary, got id \
         1023: \
         a tokenizer that does not belong to the model; take config.json and tokenizer.json from \
          the same model"
    );
    write(
        "generation_config.json",
        br#"{"eos_token_id": [0, 2, 99999]}"#,
    );
    let loaded = TextTokenizer::load(folder.path(), 1024).unwrap();
    assert_eq!(loaded.eos_ids(), [0, 2]);
    write("chat_template.jinja", b"{% for %}");
    assert!(load(1024).starts_with(
        "chat template: DIR/tokenizer.json: expected a chat template that parses, got "
    ));
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    write(
        "tokenizer_config.json",
        br#"{"eos_token": {"content": "<eos>"}}"#,
    );
    assert_eq!(
        load(1024),
        "tokenizer: DIR/tokenizer.json: expected the eos_token <eos> of tokenizer_config.json, \
         got a vocabulary without it; take both files from the same model"
    );
    std::fs::File::create(folder.path().join("tokenizer.json"))
        .unwrap()
        .set_len((64 << 20) + 1)
        .unwrap();
    assert_eq!(
        load(1024),
        "tokenizer: DIR/tokenizer.json: expected a file of at most 67108864 bytes, got 67108865 \
         bytes; \
         take the file from the model's repository"
    );
}

/// The trained text of one row of messages by a template.
fn trained_text(template: &str, messages: &str) -> Result<Vec<String>, String> {
    let row: Value = serde_json::from_str(&format!("{{\"messages\": {messages}}}")).unwrap();
    let row = terrace::data::formats::read(&row, DataFormat::Messages, false).unwrap();
    let terrace::data::formats::Row::Chat(conversation) = row else {
        panic!("a conversation")
    };
    let template = ChatTemplate::new(template, Vec::new()).map_err(|fault| fault.got)?;
    let rendered = template
        .renderer()
        .unwrap()
        .render(&conversation)
        .map_err(|fault| fault.got)?;
    Ok(rendered
        .trained
        .iter()
        .map(|range| rendered.text[range.clone()].to_string())
        .collect())
}

#[test]
fn odd_templates_never_train_on_the_user() {
    let messages = r#"[{"role": "user", "content": "xay"}, {"role": "assistant", "content": "xby"},
        {"role": "user", "content": "xcy"}, {"role": "assistant", "content": "xdy"}]"#;
    // Only the last turn is written with its end: the first is no prefix.
    let last = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if loop.last %}<end>{% \
     else %};{% endif %}\
        {% endfor %}{% if add_generation_prompt %}a:{% endif %}";
    assert_eq!(trained_text(last, messages).unwrap(), ["xby", "xdy<end>"]);
    // Questions are written only with their answers: the text before an answer ends too early.
    let pairs = "{% for m in messages %}{% if m.role == 'assistant' %}[{{ messages[loop.index0 - \
     1].content }}]\
        {{ m.content }}.{% endif %}{% endfor %}";
    assert_eq!(trained_text(pairs, messages).unwrap(), ["xby.", "xdy."]);
    // A summary of the answers before the questions: no place is the first answer's alone.
    let summary = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif \
     %}{% endfor %}|\
        {% for m in messages %}{{ m.content }};{% endfor %}";
    assert_eq!(
        trained_text(summary, messages),
        Err("turn 2 of the assistant, which overlaps another".to_string())
    );
    // The newest message first.
    let reversed = "{% for m in messages[::-1] %}{{ m.role[0] }}:{{ m.content }};{% endfor %}";
    assert_eq!(
        trained_text(reversed, messages),
        Err("turn 2 of the assistant, which overlaps another".to_string())
    );
    let raises = "{{ raise_exception('roles must alternate') }}";
    assert_eq!(
        trained_text(raises, messages),
        Err("roles must alternate (template line 1)".to_string())
    );
    // Only the whole conversation renders.
    let picky = "{% if messages|length != 4 %}{{ raise_exception('four') }}{% endif %}\
        {% for m in messages %}{{ m.role[0] }}:{{ m.content }}.\n{% endfor %}";
    assert_eq!(
        trained_text(picky, messages),
        Err("four (template line 1)".to_string())
    );
    let tagged = "{% for m in messages %}\n  {%- if m.role == 'assistant' %}\n    {%- generation \
     -%} {{ m.content }} \
        {%- endgeneration -%}\n  {%- else %}{{ m.content }}{% endif %}\n{% endfor %}";
    assert_eq!(trained_text(tagged, messages).unwrap(), ["xby", "xdy"]);
}

#[test]
fn templates_print_as_python_does() {
    let render = |source: &str| {
        let template = ChatTemplate::new(source, vec![("bos_token".into(), "<s>".into())]).unwrap();
        template
            .renderer()
            .unwrap()
            .prompt(&terrace::data::formats::Conversation::exchange(
                "it's".into(),
                "b".into(),
            ))
    };
    for (source, expected) in [
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        (
            "{{ none }} {{ true }} {{ 1.0 }} {{ 1e20 }} {{ 0.00001 }}",
            "None True 1.0 1e+20 1e-05",
        ),
        ("{{ messages[0] }}", "{'role': 'user', 'content': \"it's\"}"),
        ("{{ [1, 'a', none] }}", "[1, 'a', None]"),
        (
            "{{ {'a': [1, 2.5], 'b': '<&>\\u00e4'} | tojson }}",
            "{\"a\": [1, 2.5], \"b\": \"<&>ä\"}",
        ),
        (
            "{{ {'a': [1], 'b': {}} | tojson(indent=2) }}",
            "{\n  \"a\": [\n    1\n  ],\n  \"b\": {}\n}",
        ),
        (
            "{{ strftime_now('%d %b %Y, %A %H:%M') }}",
            "26 Jul 2024, Friday 00:00",
        ),
        ("{{ ' a '.strip() ~ 'x,y'.split(',')[-1] }}", "ay"),
        (
            "{% if tools is none %}no{% endif %}{% if x is defined %}x{% endif %}",
            "no",
        ),
        ("  {% if true %}\n a\n  {% endif %}\nb\n", " a\nb"),
        (
            "{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m.role }}{% \
             endfor %}",
            "user",
        ),
    ] {
        assert_eq!(render(source).unwrap(), expected, "{source}");
    }
}

/// A dataset of rows of ids, each row's first id its number, with `masked` rows wholly masked.
fn numbered(lengths: &[usize], masked: &[bool]) -> Arc<Dataset> {
    let mut lines = String::new();
    for (row, &length) in lengths.iter().enumerate() {
        let ids: Vec<i64> = (0..length as i64).map(|at| row as i64 * 64 + at).collect();
        let labels = if masked[row] {
            vec![-100; length]
        } else {
            ids.clone()
        };
        lines.push_str(&serde_json::json!({"input_ids": ids, "labels": labels}).to_string());
        lines.push('\n');
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    std::fs::write(&path, lines).unwrap();
    Arc::new(Dataset::load(&[path], &config(64), None, 1 << 20).unwrap())
}

/// Rows of a micro-batch by their numbers, after a check of everything else in it.
fn rows_of(micro: &Micro) -> Vec<u32> {
    assert_eq!(micro.bounds[0], 0);
    assert_eq!(*micro.bounds.last().unwrap() as usize, micro.tokens.len());
    assert_eq!(micro.tokens.len(), micro.targets.len());
    let mut rows = Vec::new();
    for bounds in micro.bounds.windows(2) {
        let (start, end) = (bounds[0] as usize, bounds[1] as usize);
        let row = micro.tokens[start] / 64;
        for at in start..end {
            let position = (at - start) as u32;
            assert_eq!(micro.positions[at], position);
            assert_eq!(micro.tokens[at], row * 64 + position);
            let target = if at + 1 < end {
                row * 64 + position + 1
            } else {
                IGNORE
            };
            assert_eq!(micro.targets[at], target);
        }
        rows.push(row);
    }
    rows
}

fn cases(count: u32) -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(count)
    }
}

fn rows_and_masks() -> impl Strategy<Value = (Vec<usize>, Vec<bool>)> {
    prop::collection::vec((1usize..=64, prop::bool::weighted(0.2)), 1..150).prop_map(|rows| {
        let (mut lengths, mut masked): (Vec<usize>, Vec<bool>) = rows.into_iter().unzip();
        lengths.push(2);
        masked.push(false);
        (lengths, masked)
    })
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn every_row_comes_once_an_epoch(
        (lengths, masked) in rows_and_masks(),
        seed: u64,
        packing: bool,
        shuffle: bool,
        micro_batch in 1u64..4,
    ) {
        let dataset = numbered(&lengths, &masked);
        let settings = DataConfig { packing, shuffle, ..config(64) };
        let mut batches = Batches::new(dataset.clone(), &settings, 1, 1, seed).unwrap();
        // A row of one token is without a target too.
        let (expected, others): (Vec<u32>, Vec<u32>) = (0..lengths.len() as u32)
            .partition(|&row| !masked[row as usize] && lengths[row as usize] > 1);
        prop_assert_eq!(dataset.stats().without_targets, others.len() as u64);
        for epoch in 0..2 {
            let mut seen = Vec::new();
            batches.seek(Cursor { epoch, sequence: 0 }).unwrap();
            for sequence in 0..batches.sequences() {
                batches.seek(Cursor { epoch, sequence }).unwrap();
                let micros = batches.next_step();
                prop_assert!(micros[0].tokens.len() <= 64);
                prop_assert!(micros[0].targets_count() > 0);
                seen.extend(rows_of(&micros[0]));
            }
            if !shuffle && !packing {
                prop_assert!(seen.is_sorted());
            }
            seen.sort_unstable();
            prop_assert_eq!(&seen, &expected);
        }
        let evaluated = eval_micros(&dataset, &settings, micro_batch);
        let rows = evaluated.iter().flat_map(rows_of);
        let mut seen: Vec<u32> = rows.collect();
        seen.sort_unstable();
        prop_assert_eq!(&seen, &expected);
        prop_assert!(evaluated.iter().all(|micro| micro.tokens.len() as u64 <= 64 * micro_batch));
    }

    #[test]
    fn a_cursor_resumes_exactly(
        (lengths, masked) in rows_and_masks(),
        seed: u64,
        packing: bool,
        shuffle: bool,
        (micro_batch, micro_batches) in (1u64..5, 1u64..5),
        stop in 0usize..40,
    ) {
        let dataset = numbered(&lengths, &masked);
        let settings = DataConfig { packing, shuffle, ..config(64) };
        let begin = || {
            Batches::new(dataset.clone(), &settings, micro_batch, micro_batches, seed).unwrap()
        };
        let mut whole = begin();
        for _ in 0..stop {
            whole.next_step();
        }
        let written = serde_json::to_string(&whole.cursor()).unwrap();
        let mut resumed = begin();
        resumed.seek(serde_json::from_str(&written).unwrap()).unwrap();
        for _ in 0..8 {
            let micros = whole.next_step();
            prop_assert_eq!(micros.len() as u64, micro_batches);
            prop_assert_eq!(micros, resumed.next_step());
            prop_assert_eq!(whole.cursor(), resumed.cursor());
        }
    }
}

#[test]
fn steps_wrap_into_the_next_epoch() {
    let dataset = numbered(&[8; 5], &[false; 5]);
    let settings = DataConfig {
        packing: false,
        ..config(64)
    };
    let mut batches = Batches::new(dataset.clone(), &settings, 1, 2, 7).unwrap();
    assert_eq!(
        (
            batches.steps_per_epoch(),
            batches.steps_of_epochs(2),
            batches.sequences()
        ),
        (3, 5, 5)
    );
    let mut rows = Vec::new();
    for _ in 0..5 {
        let micros = batches.next_step();
        rows.extend(micros.iter().flat_map(rows_of));
    }
    let (first, second) = rows.split_at(5);
    assert_ne!(first, second, "each epoch has its own order");
    let mut elsewhere = Batches::new(dataset.clone(), &settings, 5, 1, 7).unwrap();
    elsewhere
        .seek(Cursor {
            epoch: 1,
            sequence: 0,
        })
        .unwrap();
    assert_eq!(rows_of(&elsewhere.next_step()[0]), second);
    for epoch in [first, second] {
        let mut epoch = epoch.to_vec();
        epoch.sort_unstable();
        assert_eq!(epoch, [0, 1, 2, 3, 4]);
    }
    assert_eq!(
        batches.cursor(),
        Cursor {
            epoch: 1,
            sequence: 5
        }
    );
    let beyond = batches
        .seek(Cursor {
            epoch: 1,
            sequence: 6,
        })
        .unwrap_err()
        .to_string();
    assert_eq!(
        beyond,
        "data cursor: epoch 1: expected at most 5 sequences, got 6; \
         resume with the data, seed and batch that the run began with"
    );
    let packed = Batches::new(dataset, &config(64), 1, 1, 7).unwrap();
    assert_eq!((packed.sequences(), packed.efficiency()), (1, 40.0 / 64.0));
}

/// A row whose answer lay behind the cut made a step of its own without a loss, which ended the run
/// there, and each resume of it.
#[test]
fn rows_without_a_target_are_left_out_and_counted() {
    let lines = [
        r#"{"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100, -100, -100, -100, 5, 6]}"#,
        r#"{"input_ids": [7, 8, 9], "labels": [7, -100, -100]}"#,
        r#"{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}"#,
        r#"{"input_ids": [4]}"#,
    ];
    let cut = DataConfig {
        truncate: true,
        packing: false,
        ..config(4)
    };
    let dataset = load_bytes("a.jsonl", lines.join("\n").as_bytes(), &cut).unwrap();
    assert_eq!((dataset.rows(), dataset.row(0)), (1, &[1, 2, 3][..]));
    assert!(dataset.place(0).ends_with("a.jsonl:3"));
    let stats = dataset.stats();
    assert_eq!((stats.rows, stats.tokens, stats.targets), (1, 3, 1));
    assert_eq!((stats.truncated, stats.without_targets), (1, 3));
    let mut out = Vec::new();
    preview(&dataset, &cut, None, PreviewOptions::default(), &mut out).unwrap();
    let shown = String::from_utf8(out).unwrap();
    let end = "1 rows cut, 0 empty texts left out; 3 rows without a token to train on left out\n";
    assert!(shown.ends_with(end), "{shown}");
    let mut batches = Batches::new(Arc::new(dataset), &cut, 1, 1, 0).unwrap();
    for _ in 0..4 {
        assert_eq!(batches.next_step()[0].targets_count(), 1);
    }
    let message = load_bytes("a.jsonl", lines[..2].join("\n").as_bytes(), &cut).unwrap_err();
    assert!(
        message.contains("got 7 tokens in 2 rows, all masked"),
        "{message}"
    );
}

#[test]
fn preview_marks_what_is_masked() {
    let user = r#"{"role": "user", "content": "a\u001b[1m"}"#;
    let row = format!(r#"{{"messages": [{user}, {{"role": "assistant", "content": "b"}}]}}"#);
    let dataset = load_bytes("a.jsonl", row.as_bytes(), &config(64)).unwrap();
    let tokenizer = quickstart::tokenizer().unwrap();
    let show = |colour| {
        let options = PreviewOptions {
            sequences: 1,
            colour,
            ids: false,
        };
        let mut out = Vec::new();
        preview(&dataset, &config(64), Some(&tokenizer), options, &mut out).unwrap();
        String::from_utf8(out)
            .unwrap()
            .replace(&dataset.place(0), "FILE:1")
    };
    let tokens = dataset.stats().tokens;
    let expected = format!(
        "sequence 0: 1 rows, {tokens} of 64 tokens\n--- FILE:1, {tokens} tokens\n\
         ⟦<|im_start|>user\na\\u{{1b}}[1m<|im_end|>\n<|im_start|>assistant\n⟧b<|im_end|>\n\n\
         1 rows, {tokens} tokens, 3 trained on ({:.1} %), longest row {tokens}, mean {tokens}.0\n\
         1 sequences of at most 64 tokens, {:.1} % full; 0 rows cut, 0 empty texts left out\n",
        300.0 / tokens as f64,
        100.0 * tokens as f64 / 64.0
    );
    assert_eq!(show(false), expected);
    assert_eq!(
        show(true),
        expected.replace('⟦', "\x1b[2m").replace('⟧', "\x1b[0m")
    );
}

#[test]
fn preview_shows_ids_without_a_tokenizer() {
    let row = b"{\"input_ids\": [7, 8, 9], \"labels\": [7, 8, -100]}";
    let dataset = load_bytes("a.jsonl", row, &config(64)).unwrap();
    let options = PreviewOptions {
        sequences: 1,
        colour: false,
        ids: true,
    };
    let mut out = Vec::new();
    preview(&dataset, &config(64), None, options, &mut out).unwrap();
    let shown = String::from_utf8(out).unwrap();
    // Nothing predicts the first token.
    assert_eq!(shown.lines().nth(2), Some("⟦7⟧8⟦9⟧"));
    assert_eq!(shown.lines().nth(3), Some("ids 7 8 9"));
}

/// A post-processor that adds a first token and, as GPT-2's, moves offsets behind white space.
#[test]
fn the_first_token_is_added_once_and_offsets_stay() {
    let [(_, json), (_, settings)] = quickstart::tokenizer_files();
    let mut json: Value = serde_json::from_slice(json).unwrap();
    json["post_processor"] = serde_json::json!({"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        {"type": "TemplateProcessing",
         "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}}],
         "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
         "special_tokens": {"<|im_start|>":
            {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}}]});
    let mut settings: Value = serde_json::from_slice(settings).unwrap();
    settings["chat_template"] = Value::Null;
    let load = |json: &Value, settings: &Value| {
        TextTokenizer::from_bytes(json.to_string().as_bytes(), settings.to_string().as_bytes())
    };
    let tokenizer = load(&json, &settings).unwrap();
    let plain = quickstart::tokenizer().unwrap();
    let the = plain.encode(" the", false).unwrap();
    assert_eq!(the.len(), 1);
    assert_eq!(tokenizer.encode(" the", false).unwrap(), the);
    assert_eq!(tokenizer.encode(" the", true).unwrap(), [1, the[0]]);
    let text = quickstart::text();
    let long = Dataset::from_text("text", text, &config(1 << 20), &tokenizer).unwrap();
    assert_eq!(long.row(0)[0], 1);
    assert_eq!(
        long.row(0)[1..long.row(0).len() - 1],
        plain.encode(text, false).unwrap()
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    std::fs::write(&path, "{\"prompt\": \"of \", \"completion\": \"the\"}").unwrap();
    let dataset = load_path(&path, &config(64), Some(&tokenizer)).unwrap();
    let trained: Vec<bool> = (0..4).map(|at| dataset.is_trained(0, at)).collect();
    // <|im_start|>, "of", " the" that begins with the prompt's space, <|endoftext|>.
    assert_eq!(dataset.row(0).len(), 4);
    assert_eq!(trained, [false, false, false, true]);
}

#[test]
fn an_answer_within_a_prompt_is_not_trained_on() {
    let row =
        br#"{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "completion": [{"role": "assistant", "content": "c"}]}"#;
    let row = String::from_utf8_lossy(row).replace('\n', "");
    let dataset = load_bytes("a.jsonl", row.as_bytes(), &config(64)).unwrap();
    let tokenizer = quickstart::tokenizer().unwrap();
    let ids = dataset.row(0).iter().enumerate();
    let trained: Vec<u32> = ids
        .filter(|&(at, _)| dataset.is_trained(0, at))
        .map(|(_, &id)| id)
        .collect();
    assert_eq!(tokenizer.decode(&trained, false).unwrap(), "c<|im_end|>\n");
}

#[test]
fn tokens_are_sorted_with_their_positions() {
    assert_eq!(
        sorted_tokens(&[5, 2, 5, 9, 2, 5]),
        (vec![2, 5, 9], vec![0, 2, 5, 6], vec![1, 4, 0, 2, 5, 3])
    );
    assert_eq!(sorted_tokens(&[]), (vec![], vec![0], vec![]));
}

#[test]
fn the_quickstart_is_whole() {
    let tokenizer = quickstart::tokenizer().unwrap();
    assert_eq!(tokenizer.ids_end(), quickstart::VOCAB_SIZE);
    let (train, held_out) = (quickstart::train_text(), quickstart::held_out_text());
    assert_eq!(train.to_string() + held_out, quickstart::text());
    let share = held_out.len() as f64 / quickstart::text().len() as f64;
    assert!((0.045..0.055).contains(&share), "{share}");
    let ids = tokenizer.encode(held_out, false).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), held_out);
    let entropy = quickstart::unigram_entropy(&ids);
    println!("unigram entropy {entropy:.4} nats, {} tokens", ids.len());
    assert!((4.0..1024f64.ln()).contains(&entropy), "{entropy}");
    assert_eq!(quickstart::unigram_entropy(&[3, 1, 3, 1]), 2f64.ln());
}
