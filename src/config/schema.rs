//! run.toml as a JSON schema, for editors that complete and check TOML.
//!
//! - What a key takes is asked of its own reader: a value that no key takes is refused with the
//!   words for what is right, and those are read here. So the schema cannot differ from the reader.

use serde_json::{Map, Value, json};
use toml::de::{DeTable, DeValue};

use super::RunConfig;
use super::given::Given;
use super::keys::{Key, TABLES};
use crate::error::Error;

/// The schema of a run.toml.
pub fn json_schema() -> Value {
    let mut tables = Map::new();
    for table in &TABLES {
        let keys = table.keys.iter();
        let properties: Map<String, Value> = keys
            .map(|key| (key.name.to_string(), schema_of(key)))
            .collect();
        let schema = json!({
            "type": "object",
            "description": table.about,
            "additionalProperties": false,
            "properties": properties,
        });
        tables.insert(table.name.to_string(), schema);
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "run.toml",
        "type": "object",
        "additionalProperties": false,
        "required": ["model", "data", "train"],
        "properties": tables,
    })
}

fn schema_of(key: &'static Key) -> Value {
    let mut schema = type_of(&expected(key));
    schema["description"] = key.meaning.replace('\n', " ").into();
    let default = format!("value = {}", key.default);
    let default = toml::from_str::<Map<String, Value>>(&default);
    if let Some(default) = default.ok().and_then(|mut table| table.remove("value")) {
        schema["default"] = default;
    }
    schema
}

/// What the key's reader says that it expects.
fn expected(key: &'static Key) -> String {
    let nothing = DeValue::Table(DeTable::new());
    let given = Given {
        key,
        place: String::new(),
        value: &nothing,
    };
    match (key.set)(&mut RunConfig::default(), &given) {
        Err(Error::Input { expected, .. }) => expected,
        _ => String::new(),
    }
}

/// The schema of what `expected` says.
fn type_of(expected: &str) -> Value {
    if let Some(range) = expected.strip_prefix("an integer from ") {
        let (least, most) = range.split_once(" to ").unwrap_or(("0", ""));
        let bound = |text: &str| text.parse::<u64>().ok();
        return json!({"type": "integer", "minimum": bound(least), "maximum": bound(most)});
    }
    if let Some(names) = expected.strip_prefix("one of ") {
        let names: Vec<&str> = names
            .split(", ")
            .map(|name| name.trim_matches('"'))
            .collect();
        return json!({"enum": names});
    }
    let path = json!({"type": "string", "minLength": 1});
    let size = json!({
        "type": "string",
        "pattern": r"^(auto|\d+(\.\d+)?\s*([kKMGTP]B|[KMGTP]iB|B))$",
    });
    let place = json!({
        "type": "object",
        "additionalProperties": false,
        "required": ["path"],
        "properties": {"path": path, "size": size},
    });
    let either =
        |one: &Value, list: &Value| json!({"anyOf": [one, {"type": "array", "items": list}]});
    match expected {
        "true or false" => json!({"type": "boolean"}),
        "a path in quotes" => path,
        "a text in quotes, or a list of them" => either(&path, &path),
        "a path in quotes, or a list of them" => either(&path, &path),
        "a path in quotes, or a list of { path, size }" => {
            either(&path, &json!({"anyOf": [path, place]}))
        }
        "two numbers, each at least 0 and less than 1" => json!({
            "type": "array",
            "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            "minItems": 2,
            "maxItems": 2,
        }),
        "a list of numbers above 0" => {
            json!({"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}})
        }
        size_text if size_text.starts_with("a size") => size,
        port if port.starts_with("a port") => json!({"anyOf": [
            {"type": "integer", "minimum": 0, "maximum": u16::MAX},
            {"type": "string", "pattern": r"^.+:\d+$"},
        ]}),
        number if number.contains("number") => json!({"type": "number", "minimum": 0}),
        _ => json!({}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::keys::keys;

    #[test]
    fn every_key_has_a_type() {
        for key in keys() {
            let schema = schema_of(key);
            let typed = ["type", "enum", "anyOf"];
            assert!(
                typed.iter().any(|name| schema.get(name).is_some()),
                "{}: what its reader expects has no type in the schema: {:?}",
                key.path(),
                expected(key)
            );
        }
    }
}
