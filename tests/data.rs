//! Goal: rows become the tokens and the mask that transformers makes; every broken input is one
//! clear line; every token comes once an epoch, and a cursor resumes exactly.
//! Method: goldens by transformers (`golden/make_data.py`), a table of bad inputs with their whole
//! messages, and properties on random rows.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;
use terrace::config::{DataConfig, DataFormat, RunConfig, TokenCache};
use terrace::data::preview::{PreviewOptions, preview};
use terrace::data::templates::ChatTemplate;
use terrace::data::{
    Batches, Cursor, Dataset, IGNORE, Micro, Row, TextTokenizer, eval_micros, quickstart,
    sorted_tokens,
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/data")
}

fn config(seq_len: u64) -> DataConfig {
    DataConfig {
        seq_len,
        cache: TokenCache::Off,
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

fn ids(dataset: &Dataset, row: u32) -> Vec<u32> {
    dataset.row(row).unwrap().ids
}

fn compare_with_golden(case: &str, tokenizer: &TextTokenizer) {
    let golden: Value =
        serde_json::from_slice(&std::fs::read(fixtures().join("golden.json")).unwrap()).unwrap();
    let files = golden[case].as_object().unwrap();
    assert!(files.len() >= 3, "{case}");
    for (file, rows) in files {
        let rows = rows.as_array().unwrap();
        let dataset = Dataset::load(
            &[fixtures().join(file)],
            &config(8192),
            Some(tokenizer),
            tokenizer.ids_end(),
        )
        .unwrap();
        assert_eq!(dataset.rows() as usize, rows.len(), "{case} {file}");
        for (row, golden) in (0..dataset.rows()).zip(rows) {
            let Row { ids, trained } = dataset.row(row).unwrap();
            let mask: Vec<u32> = trained.into_iter().map(u32::from).collect();
            let text = tokenizer.decode(&ids, false).unwrap();
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
            assert_eq!(fnv(&ids), golden["ids"], "{case} {file} row {row}: {text}");
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
    for name in ["smollm2", "qwen3", "llama3", "mistral"] {
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
        .flat_map(|row| ids(&dataset, row))
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
    assert_eq!(ids(&dataset, 0), marking.encode(&text, true).unwrap());
    assert_eq!(ids(&dataset, 0).iter().filter(|&&id| id == 2).count(), 1);
}

/// Texts in which a word is not what it seems: spaces, marks, scripts, special tokens.
const ODD_TEXTS: [&str; 12] = [
    "",
    " ",
    "a",
    " a  b   c \n d\n\ne\n f",
    "don't 'tis 'S x'll 12 345 6,7 8.9",
    "\u{2581} \u{2581}a \u{2581} b\u{2581} c a\u{2581}b",
    "e\u{301} \u{301}x o\u{308} n \u{303}",
    "слово слово \u{4e2d}\u{6587} \u{4e2d}\u{6587}\u{3000}\u{4e2d} \u{1f600} \u{1f600}\u{200d}",
    "<|im_start|>user\nhi there<|im_end|>\n<|endoftext|> x<|endoftext|>y [INST] a [/INST] b</s>c",
    "a\tb \tc\t d\r\ne \r f\u{a0}g \u{a0}h",
    "x = (a + b)*c; // y\nif x { y }\n}\n\n# z",
    "\u{0}\u{1} \u{7f} a\u{200b} b \u{feff}c",
];

/// Whatever is remembered of earlier words, ids are those of the tokenizers library.
fn compare_with_tokenizers(folder: &Path, text: &str) {
    let reference = tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    let tokenizer = TextTokenizer::load(folder, 1 << 20).unwrap();
    // Twice: the second time words are remembered.
    for text in ODD_TEXTS.into_iter().chain([text]).chain(ODD_TEXTS) {
        for special in [false, true] {
            let expected = reference.encode(text, special).unwrap();
            assert_eq!(
                tokenizer.encode(text, special).unwrap(),
                expected.get_ids(),
                "{text:?}"
            );
        }
    }
}

#[test]
fn remembered_words_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in quickstart::tokenizer_files() {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    compare_with_tokenizers(folder.path(), quickstart::text());
    let texts = ODD_TEXTS.concat();
    let pieces: Vec<&str> = texts
        .split_inclusive(|c: char| !c.is_alphanumeric())
        .collect();
    let tokenizer = quickstart::tokenizer().unwrap();
    let reference = folder.path().join("tokenizer.json");
    let reference = tokenizers::Tokenizer::from_file(reference).unwrap();
    proptest!(cases(400), |(picks in prop::collection::vec(0..pieces.len(), 0..12))| {
        let text: String = picks.into_iter().map(|at| pieces[at]).collect();
        let expected = reference.encode(text.as_str(), false).unwrap();
        prop_assert_eq!(tokenizer.encode(&text, false).unwrap(), expected.get_ids());
    });
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
        let ids = ids(&dataset, 0);
        assert_eq!(ids[..ids.len() - 1], tokenizer.encode(&text, true).unwrap());
        assert_eq!(ids.len() - 1, tokens, "{folder}");
        compare_with_tokenizers(&material.join(folder), &text[..200_000]);
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
        Err(
            "dataset: FILE: expected a directory of .json, .jsonl, .ndjson, .txt, .text, \
             .parquet or .bin files, got none in it; name the files themselves"
                .into()
        )
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
    let text = "dataset: FILE:1: expected lines that begin with a letter, within 33554432 bytes, \
        got none; write rows of `text` as JSON lines";
    assert_eq!(sparse("text.txt", b"a", 10 << 30), Err(text.into()));
}

#[test]
fn odd_files_are_read() {
    let tokenizer = quickstart::tokenizer().unwrap();
    let text = |dataset: &Dataset, row| tokenizer.decode(&ids(dataset, row), false).unwrap();
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
    assert_eq!((ids(&cut, 0), cut.stats().truncated), (vec![1, 2, 3, 4], 1));
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
    assert_eq!(ids(&padded, 0), [7, 8, 9]);
    let micros = eval_micros(&padded, &config(4), 1).unwrap();
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
        plain.decode(&ids(&dataset, 0), false).unwrap(),
        "Who begat<|endoftext|>"
    );
    let trained: Vec<u32> = (0..ids(&dataset, 0).len())
        .filter(|&at| dataset.row(0).unwrap().trained[at])
        .map(|at| ids(&dataset, 0)[at])
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
                let micros = batches.next_step().unwrap();
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
        let evaluated = eval_micros(&dataset, &settings, micro_batch).unwrap();
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
            whole.next_step().unwrap();
        }
        let written = serde_json::to_string(&whole.cursor()).unwrap();
        let mut resumed = begin();
        resumed.seek(serde_json::from_str(&written).unwrap()).unwrap();
        for _ in 0..8 {
            let micros = whole.next_step().unwrap();
            prop_assert_eq!(micros.len() as u64, micro_batches);
            prop_assert_eq!(micros, resumed.next_step().unwrap());
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
        let micros = batches.next_step().unwrap();
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
    assert_eq!(rows_of(&elsewhere.next_step().unwrap()[0]), second);
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
    assert_eq!((dataset.rows(), ids(&dataset, 0)), (1, vec![1, 2, 3]));
    assert!(dataset.place(0).ends_with("a.jsonl:3"));
    let stats = dataset.stats();
    assert_eq!((stats.rows, stats.tokens, stats.targets), (1, 3, 1));
    assert_eq!((stats.truncated, stats.without_targets), (1, 3));
    let mut out = Vec::new();
    preview(&dataset, &cut, None, PreviewOptions::default(), &mut out).unwrap();
    let shown = String::from_utf8(out).unwrap();
    let end = "1 rows cut, 0 empty texts left out; 3 rows without a token to train on left out\n";
    assert!(shown.contains(end), "{shown}");
    let mut batches = Batches::new(Arc::new(dataset), &cut, 1, 1, 0).unwrap();
    for _ in 0..4 {
        assert_eq!(batches.next_step().unwrap()[0].targets_count(), 1);
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
         1 sequences of at most 64 tokens, {:.1} % full; 0 rows cut, 0 empty texts left out\n\
         row lengths: half are at most {tokens} tokens, 90 % {tokens}, 99 % {tokens}\n\
         rows of the files by tokens, before they are cut or split:\n{:>17} {} 1\n",
        300.0 / tokens as f64,
        100.0 * tokens as f64 / 64.0,
        "17–32",
        "█".repeat(40)
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
    assert_eq!(ids(&long, 0)[0], 1);
    assert_eq!(
        ids(&long, 0)[1..ids(&long, 0).len() - 1],
        plain.encode(text, false).unwrap()
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    std::fs::write(&path, "{\"prompt\": \"of \", \"completion\": \"the\"}").unwrap();
    let dataset = load_path(&path, &config(64), Some(&tokenizer)).unwrap();
    let trained: Vec<bool> = (0..4)
        .map(|at| dataset.row(0).unwrap().trained[at])
        .collect();
    // <|im_start|>, "of", " the" that begins with the prompt's space, <|endoftext|>.
    assert_eq!(ids(&dataset, 0).len(), 4);
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
    let Row { ids, trained } = dataset.row(0).unwrap();
    let trained: Vec<u32> = ids
        .into_iter()
        .zip(trained)
        .filter_map(|(id, trained)| trained.then_some(id))
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

/// A folder with the quickstart's rows under several names.
fn folder_of(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

/// Texts of all rows of a dataset that `config` describes.
fn texts_of(config: &DataConfig) -> Result<Vec<String>, String> {
    let tokenizer = quickstart::tokenizer().unwrap();
    let dataset = Dataset::load(&config.train, config, Some(&tokenizer), 1024);
    let dataset = dataset.map_err(|error| error.to_string())?;
    let text = |row| tokenizer.decode(&ids(&dataset, row), false).unwrap();
    Ok((0..dataset.rows()).map(text).collect())
}

/// Names of dataset_info.json give what the same rows give in the keys that every format has.
#[test]
fn registered_datasets_are_their_rows() {
    let registry = r#"{
        "plain": {"file_name": "plain.jsonl"},
        "renamed": {"file_name": "renamed.jsonl",
            "columns": {"prompt": "q", "query": "more", "response": "a", "system": "s",
                        "history": "h"}},
        "unused": {"file_name": "renamed.jsonl", "columns": {"prompt": "q", "response": "a"}},
        "chat": {"file_name": "chat.json", "formatting": "sharegpt",
            "columns": {"messages": "talk", "system": "s"},
            "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "U",
                     "assistant_tag": "A"}},
        "openai": {"file_name": "openai.jsonl", "formatting": "openai"},
        "texts": {"file_name": "texts", "columns": {"prompt": "body"}}
    }"#;
    let folder = folder_of(&[
        ("dataset_info.json", registry),
        (
            "plain.jsonl",
            r#"{"instruction": "i", "input": "x", "output": "o"}"#,
        ),
        (
            "renamed.jsonl",
            r#"{"q": "i", "more": "x", "a": "o", "s": "be", "h": [["1", "2"]]}"#,
        ),
        (
            "chat.json",
            r#"[{"s": "be", "talk": [{"who": "U", "says": "i"}, {"who": "A", "says": "o"}]}]"#,
        ),
        (
            "openai.jsonl",
            r#"{"messages": [{"role": "user", "content": "i"},
                {"role": "assistant", "content": "o"}]}"#
                .replace('\n', "")
                .as_str(),
        ),
    ]);
    std::fs::create_dir(folder.path().join("texts")).unwrap();
    for (name, body) in [("b.jsonl", "second"), ("a.jsonl", "first")] {
        let path = folder.path().join("texts").join(name);
        std::fs::write(path, format!("{{\"body\": \"{body}\"}}\n")).unwrap();
    }
    let texts = |name: &str| {
        let dataset_dir = Some(folder.path().to_path_buf());
        let train = vec![PathBuf::from(name)];
        texts_of(&DataConfig {
            train,
            dataset_dir,
            ..config(512)
        })
        .unwrap()
    };
    let turn = |role: &str, text: &str| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
    let (user, answer) = (turn("user", "i\nx"), turn("assistant", "o"));
    assert_eq!(texts("plain"), [format!("{user}{answer}")]);
    let history = format!("{}{}", turn("user", "1"), turn("assistant", "2"));
    let system = turn("system", "be");
    assert_eq!(
        texts("renamed"),
        [format!("{system}{history}{user}{answer}")]
    );
    let user = turn("user", "i");
    assert_eq!(texts("unused"), [format!("{user}{answer}")]);
    assert_eq!(texts("chat"), [format!("{system}{user}{answer}")]);
    assert_eq!(texts("openai"), [format!("{user}{answer}")]);
    assert_eq!(
        texts("texts"),
        ["first<|endoftext|>", "second<|endoftext|>"]
    );
}

#[test]
fn directories_patterns_and_max_samples() {
    let folder = folder_of(&[
        ("x_2.jsonl", "{\"text\": \"c\"}\n{\"text\": \"d\"}\n"),
        ("x_1.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n"),
        ("y.txt", "e"),
        ("notes.md", "not data"),
        (".hidden.jsonl", "{"),
    ]);
    let texts = |entry: &str, max_samples| {
        let train = vec![folder.path().join(entry)];
        let texts = texts_of(&DataConfig {
            train,
            max_samples,
            ..config(512)
        })
        .unwrap();
        texts.concat().replace("<|endoftext|>", " ")
    };
    assert_eq!(texts("", None), "a b c d e ");
    assert_eq!(texts("x_*.jsonl", None), "a b c d ");
    assert_eq!(texts("?_1.json*", None), "a b ");
    assert_eq!(texts("", Some(3)), "a b c ");
    assert_eq!(texts("x_1.jsonl", Some(1)), "a ");
    assert_eq!(texts("x_1.jsonl", Some(9)), "a b ");
}

/// Rows of `lengths` in one file each, as sources of a dataset.
fn sources(counts: &[usize], settings: DataConfig) -> (tempfile::TempDir, DataConfig) {
    let folder = tempfile::tempdir().unwrap();
    let mut train = Vec::new();
    for (source, &count) in counts.iter().enumerate() {
        // The second token names the source, the third the row.
        let line = |row| format!("{{\"input_ids\": [0, {source}, {row}]}}\n");
        let path = folder.path().join(format!("{source}.jsonl"));
        std::fs::write(&path, (0..count).map(line).collect::<String>()).unwrap();
        train.push(path);
    }
    (folder, DataConfig { train, ..settings })
}

/// (source, row) of each sequence of the next `epochs` epochs.
fn taken(batches: &mut Batches, epochs: u64) -> Vec<Vec<(u32, u32)>> {
    (0..epochs)
        .map(|_| {
            let micros = (0..batches.sequences()).map(|_| batches.next_step().unwrap().remove(0));
            micros
                .map(|micro| (micro.tokens[1], micro.tokens[2]))
                .collect()
        })
        .collect()
}

#[test]
fn weights_are_shares_of_rows_and_no_row_comes_before_all_of_its_source_came() {
    for shuffle in [false, true] {
        let settings = DataConfig {
            mix: vec![3.0, 1.0, 0.5],
            packing: false,
            shuffle,
            ..config(8)
        };
        let (_folder, settings) = sources(&[60, 45, 11], settings);
        let (dataset, eval) = terrace::data::load(&settings, 5, None, 1 << 20).unwrap();
        assert!(eval.is_none());
        let dataset = Arc::new(dataset);
        let shares: Vec<f64> = dataset
            .sources()
            .iter()
            .map(|source| source.share)
            .collect();
        assert_eq!(shares, [60.0 / 90.0, 20.0 / 90.0, 10.0 / 90.0]);
        let mut batches = Batches::new(dataset.clone(), &settings, 1, 1, 5).unwrap();
        let epochs = taken(&mut batches, 9);
        for epoch in &epochs {
            let count = |source| epoch.iter().filter(|(of, _)| *of == source).count();
            assert_eq!([count(0), count(1), count(2)], [60, 20, 10]);
            // Sources are mixed through the whole epoch, not one after the other.
            let first = epoch[..45].iter().filter(|(of, _)| *of == 0).count();
            assert!((20..=40).contains(&first), "{first}");
        }
        for (source, rows) in [(0, 60), (1, 45), (2, 11)] {
            let all: Vec<u32> = epochs
                .iter()
                .flat_map(|epoch| {
                    let mut own: Vec<u32> = epoch
                        .iter()
                        .filter(|(of, _)| *of == source)
                        .map(|(_, row)| *row)
                        .collect();
                    own.sort_unstable();
                    own
                })
                .collect();
            // Within an epoch a row comes once; over the epochs equally often but for one pass.
            let count = |row| all.iter().filter(|other| **other == row).count();
            let counts: Vec<usize> = (0..rows).map(count).collect();
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(most - least <= 1, "source {source}: {counts:?}");
        }
        // A cursor is enough to go on.
        let mut again = Batches::new(dataset, &settings, 1, 1, 5).unwrap();
        let middle = Cursor {
            epoch: 4,
            sequence: 33,
        };
        again.seek(middle).unwrap();
        let next = again.next_step().unwrap();
        assert_eq!((next[0].tokens[1], next[0].tokens[2]), epochs[4][33]);
    }
}

#[test]
fn a_split_holds_out_a_share_or_a_count_of_each_source() {
    let of = |eval_split: f64, seed: u64, mix: &[f64]| {
        let settings = DataConfig {
            eval_split,
            mix: mix.to_vec(),
            packing: false,
            ..config(8)
        };
        let (folder, settings) = sources(&[40, 200], settings);
        let (train, eval) = terrace::data::load(&settings, seed, None, 1 << 20).unwrap();
        let eval = eval.expect("a split");
        let rows = |dataset: &Dataset| -> Vec<(u32, u32)> {
            let of = |row| ids(dataset, row);
            let of = (0..dataset.rows()).map(of);
            of.map(|ids| (ids[1], ids[2])).collect()
        };
        let rows = (rows(&train), rows(&eval));
        assert_eq!(train.stats().rows, rows.0.len() as u64);
        assert_eq!(eval.stats().targets, 2 * rows.1.len() as u64);
        assert_eq!(train.stats().targets + eval.stats().targets, 480);
        drop(folder);
        (rows, train.sources())
    };
    let ((train, eval), _) = of(0.1, 1, &[]);
    assert_eq!((train.len(), eval.len()), (216, 24));
    assert_eq!(eval.iter().filter(|(source, _)| *source == 0).count(), 4);
    let mut all = [train.clone(), eval.clone()].concat();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 240, "each row is in one of them");
    assert_eq!(
        of(0.1, 1, &[]).0,
        (train, eval.clone()),
        "the same seed, the same rows"
    );
    assert_ne!(of(0.1, 2, &[]).0.1, eval);
    assert_eq!(of(3.0, 1, &[]).0.1.len(), 6);
    let (_, sources) = of(0.25, 1, &[1.0, 1.0]);
    assert_eq!((sources[0].rows, sources[1].rows), (30, 150));
    assert_eq!(sources[0].share, 0.5);
}

/// Files of a directory with an ending, by name.
fn with_ending(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|own| own == ending))
        .collect();
    paths.sort();
    paths
}

#[test]
fn the_token_cache_gives_the_same_rows_and_knows_when_it_is_stale() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder_of(&[(
        "a.jsonl",
        "{\"text\": \"one\"}\n\n{\"text\": \"two three\"}\n",
    )]);
    let cache = folder.path().join("cache");
    let tokenizer = quickstart::tokenizer().unwrap();
    let load = |cache: TokenCache, seq_len| {
        let settings = DataConfig {
            cache,
            ..config(seq_len)
        };
        Dataset::load(
            &[folder.path().join("a.jsonl")],
            &settings,
            Some(&tokenizer),
            1024,
        )
        .unwrap()
    };
    let cached = || load(TokenCache::At(cache.clone()), 64);
    let all = |dataset: &Dataset| -> Vec<_> {
        let row = |row| {
            (
                dataset.row(row).unwrap(),
                dataset.place(row),
                dataset.row_len(row),
            )
        };
        (0..dataset.rows()).map(row).collect()
    };
    let plain = load(TokenCache::Off, 64);
    for (time, note) in [(0, "kept in"), (1, "read from")] {
        let dataset = cached();
        assert_eq!(all(&dataset), all(&plain), "time {time}");
        assert_eq!(dataset.fingerprint(), plain.fingerprint());
        assert_eq!(dataset.stats(), plain.stats());
        assert!(dataset.notes()[0].contains(note), "{:?}", dataset.notes());
    }
    let files = with_ending(&cache, "tokens");
    assert_eq!(files.len(), 1);
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&cache), mode(&files[0])), (0o700, 0o600));
    // Every byte counts: a damaged file is made again.
    let whole = std::fs::read(&files[0]).unwrap();
    for at in (0..whole.len()).step_by(7) {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        std::fs::write(&files[0], damaged).unwrap();
        assert_eq!(all(&cached()), all(&plain), "byte {at}");
        assert_eq!(std::fs::read(&files[0]).unwrap(), whole, "byte {at}");
    }
    std::fs::write(&files[0], &whole[..whole.len() - 1]).unwrap();
    assert_eq!(all(&cached()), all(&plain));
    // Other settings or another text are other files; a part that nobody writes goes.
    std::fs::write(cache.join("1-1.part"), "left behind").unwrap();
    load(TokenCache::At(cache.clone()), 32);
    assert_eq!(with_ending(&cache, "tokens").len(), 2);
    assert_eq!(with_ending(&cache, "part"), Vec::<PathBuf>::new());
    std::fs::write(folder.path().join("a.jsonl"), "{\"text\": \"two\"}\n").unwrap();
    assert_eq!(cached().rows(), 1);
    assert_eq!(with_ending(&cache, "tokens").len(), 3);
}

#[test]
fn the_token_cache_is_bounded_and_shared() {
    let text = |name: &str| format!("{{\"text\": \"{}\"}}\n", name.repeat(400));
    let (a, b, c) = (text("a "), text("b "), text("c "));
    let folder = folder_of(&[("a.jsonl", &a), ("b.jsonl", &b), ("c.jsonl", &c)]);
    let cache = folder.path().join("cache");
    let tokenizer = quickstart::tokenizer().unwrap();
    let load = |name: &str, bytes: u64| {
        let settings = DataConfig {
            cache: TokenCache::At(cache.clone()),
            cache_size: terrace::config::Size::Bytes(bytes),
            ..config(64)
        };
        let path = folder.path().join(name);
        Dataset::load(&[path], &settings, Some(&tokenizer), 1024)
    };
    let first = load("a.jsonl", 1 << 20).unwrap();
    let bytes = with_ending(&cache, "tokens")[0].metadata().unwrap().len();
    // Room for two: the third takes the place of the one used longest ago.
    let age = |path: &Path, seconds| {
        let past = std::time::SystemTime::now() - std::time::Duration::from_secs(seconds);
        let file = std::fs::File::options().append(true).open(path).unwrap();
        file.set_modified(past).unwrap();
    };
    let oldest = with_ending(&cache, "tokens")[0].clone();
    age(&oldest, 100);
    load("b.jsonl", bytes * 5 / 2).unwrap();
    load("c.jsonl", bytes * 5 / 2).unwrap();
    assert_eq!(with_ending(&cache, "tokens").len(), 2);
    assert!(!oldest.exists());
    // What a run has open stays readable to it.
    let row = first.row(0).unwrap();
    assert_eq!(row.ids.len(), 64);
    let error = load("a.jsonl", 100).unwrap_err().to_string();
    assert!(
        error.contains("tokens within 100 bytes, data.cache_size"),
        "{error}"
    );
    assert_eq!(with_ending(&cache, "part"), Vec::<PathBuf>::new());
    // Several at once make and read the same file.
    std::fs::remove_dir_all(&cache).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for name in ["a.jsonl", "b.jsonl"] {
                    let dataset = load(name, 1 << 20).unwrap();
                    assert_eq!(dataset.row(0).unwrap().ids.len(), 64);
                }
            });
        }
    });
    assert_eq!(with_ending(&cache, "tokens").len(), 2);
    assert_eq!(with_ending(&cache, "part"), Vec::<PathBuf>::new());
}

#[test]
fn shards_of_ids_are_rows_as_they_lie() {
    let numbers: Vec<u32> = (0..23u32).map(|at| at * 41 % 1000).collect();
    let two: Vec<u8> = numbers
        .iter()
        .flat_map(|&id| (id as u16).to_le_bytes())
        .collect();
    let four: Vec<u8> = numbers.iter().flat_map(|id| id.to_le_bytes()).collect();
    let header = |magic: u32, version: u32| {
        let mut header = vec![0u8; 1024];
        for (at, number) in [magic, version, 23].into_iter().enumerate() {
            header[at * 4..][..4].copy_from_slice(&number.to_le_bytes());
        }
        header
    };
    let folder = tempfile::tempdir().unwrap();
    let load = |name: &str, bytes: &[u8], settings: &DataConfig, vocab| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        Dataset::load(&[path], settings, None, vocab).map_err(|error| error.to_string())
    };
    let settings = config(10);
    for (name, bytes, vocab) in [
        ("raw.bin", two.clone(), 50_257),
        ("wide.bin", four.clone(), 151_936),
        ("wide_small.bin", four.clone(), 1024),
        (
            "gpt2.bin",
            [header(20_240_520, 1), two.clone()].concat(),
            151_936,
        ),
        (
            "llama3.bin",
            [header(20_240_801, 7), four.clone()].concat(),
            50_257,
        ),
    ] {
        let dataset = load(name, &bytes, &settings, vocab).unwrap();
        let rows: Vec<Vec<u32>> = (0..dataset.rows()).map(|row| ids(&dataset, row)).collect();
        assert_eq!(rows.concat(), numbers, "{name}");
        assert_eq!(
            rows.iter().map(Vec::len).collect::<Vec<_>>(),
            [10, 10, 3],
            "{name}"
        );
        assert_eq!((dataset.stats().tokens, dataset.stats().targets), (23, 20));
        assert!(dataset.place(1).ends_with(&format!("{name}: token 10")));
        let micros = eval_micros(&dataset, &settings, 1).unwrap();
        assert_eq!(micros[0].targets[..9], numbers[1..10]);
        assert_eq!(micros[0].targets[9], IGNORE);
    }
    // An id alone in the last row predicts nothing; samples count rows.
    let dataset = load("raw.bin", &two[..42], &settings, 1024).unwrap();
    assert_eq!((dataset.rows(), dataset.stats().tokens), (2, 20));
    let few = DataConfig {
        max_samples: Some(1),
        ..config(10)
    };
    assert_eq!(
        load("raw.bin", &two, &few, 1024).unwrap().stats().tokens,
        10
    );
}

/// What the template marks is the mask, less turns that are not trained on; the ids and masks of
/// transformers for such a template are the golden case llama3.
#[test]
fn generation_tags_are_the_mask() {
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
        {% if m.role == 'assistant' %}{% generation %}\n\
        {{ m.content }}<|im_end|>{% endgeneration %}\n\
        {% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}";
    let messages = r#"[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
        {"role": "user", "content": "r"}, {"role": "assistant", "content": "b", "weight": 0},
        {"role": "user", "content": "s"}, {"role": "assistant", "content": "c"}]"#;
    // The line end behind the end of turn is outside of the tags.
    assert_eq!(
        trained_text(template, messages),
        Ok(vec!["a<|im_end|>".to_string(), "c<|im_end|>".to_string()])
    );
}
