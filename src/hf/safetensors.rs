//! One safetensors file: its header, checked against the file before anything is used.
//!
//! The format: 8 bytes little-endian n, n bytes of JSON, then the tensors' bytes. The header maps
//! each name to `dtype`, `shape` and `data_offsets` (begin and end within the tensors' bytes);
//! `__metadata__` maps strings to strings.
//!
//! - Refused: a header longer than the file or than [`HEADER_BYTES_MAX`], more than
//!   [`TENSORS_MAX`] tensors, a duplicate key at any level, an unknown key or dtype, a range that
//!   is not what shape and dtype say, overlaps, holes, bytes missing or left over at the end.
//! - All arithmetic on what the file says is checked.
//! - Memory is the header's bytes and its entries, both bounded; the tensors' bytes are read at
//!   their offsets in pieces. No mapping: a file that shrinks meanwhile is an error, not SIGBUS.
//!
//! Which tensors a model needs is `import`'s business.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor,
};

use super::mapped::Mapped;
use super::{open_regular, printable_path};
use crate::error::{Error, Result, printable};

/// Most bytes of a header.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Most tensors of a file.
pub const TENSORS_MAX: usize = 1 << 17;
/// Most bytes of a tensor's name.
pub const NAME_BYTES_MAX: usize = 1024;
/// Most dimensions of a tensor.
pub const RANK_MAX: usize = 8;

/// Formats of elements that the format knows. Only some can be trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// Any other, by its index in the table.
    Other(u8),
}

/// Names of dtypes and their bits.
const DTYPES: [(&str, Dtype, u64); 21] = [
    ("BF16", Dtype::Bf16, 16),
    ("F16", Dtype::F16, 16),
    ("F32", Dtype::F32, 32),
    ("BOOL", Dtype::Other(3), 8),
    ("F4", Dtype::Other(4), 4),
    ("F6_E2M3", Dtype::Other(5), 6),
    ("F6_E3M2", Dtype::Other(6), 6),
    ("U8", Dtype::Other(7), 8),
    ("I8", Dtype::Other(8), 8),
    ("F8_E5M2", Dtype::Other(9), 8),
    ("F8_E4M3", Dtype::Other(10), 8),
    ("F8_E8M0", Dtype::Other(11), 8),
    ("F8_E4M3FNUZ", Dtype::Other(12), 8),
    ("F8_E5M2FNUZ", Dtype::Other(13), 8),
    ("I16", Dtype::Other(14), 16),
    ("U16", Dtype::Other(15), 16),
    ("I32", Dtype::Other(16), 32),
    ("U32", Dtype::Other(17), 32),
    ("F64", Dtype::Other(18), 64),
    ("I64", Dtype::Other(19), 64),
    ("U64", Dtype::Other(20), 64),
];

impl Dtype {
    fn row(self) -> &'static (&'static str, Dtype, u64) {
        let row = DTYPES.iter().find(|(_, dtype, _)| *dtype == self);
        row.expect("a Dtype comes from DTYPES")
    }

    /// Name in headers.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// Bits of an element.
    pub fn bits(self) -> u64 {
        self.row().2
    }
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Format of its elements.
    pub dtype: Dtype,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// First byte, from the beginning of the file.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// An open safetensors file with a valid header.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: Mapped,
    tensors: HashMap<String, TensorEntry>,
}

impl SafetensorsFile {
    /// Opens `dir/name` and checks its header against its length.
    ///
    /// # Errors
    /// [`Error::Input`] naming the file, the tensor where there is one, and what was expected;
    /// [`Error::Io`] from the system.
    pub fn open(dir: &Path, name: &str) -> Result<SafetensorsFile> {
        let path = dir.join(name);
        let (file, length) = open_regular(dir, name)?;
        let fault = Fault { path: &path };
        if length < 8 {
            return Err(fault.of(
                "8 bytes of header length",
                format!("a file of {length} bytes"),
            ));
        }
        let file = Mapped::new(file).map_err(|source| Error::io("map", &path, source))?;
        let mut prefix = [0u8; 8];
        read_at(&file, &path, 0, &mut prefix)?;
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > HEADER_BYTES_MAX {
            let expected = format!("a header of at most {HEADER_BYTES_MAX} bytes");
            return Err(fault.of(expected, header_bytes.to_string()));
        }
        if header_bytes > length - 8 {
            let expected = format!("a header of at most {} bytes, as the file has", length - 8);
            return Err(fault.of(expected, header_bytes.to_string()));
        }
        let mut header = vec![0u8; header_bytes as usize];
        read_at(&file, &path, 8, &mut header)?;
        if header.first() != Some(&b'{') {
            return Err(fault.of("a header that begins with {", "another byte"));
        }
        let text = std::str::from_utf8(&header).map_err(|error| {
            fault.of(
                "a header in UTF-8",
                format!("other bytes at byte {}", 8 + error.valid_up_to()),
            )
        })?;
        let Header(raw) = serde_json::from_str(text)
            .map_err(|error| fault.of("a valid header", printable(&error.to_string())))?;
        drop(header);
        let data_start = 8 + header_bytes;
        let tensors = check_ranges(raw, data_start, length - data_start, &fault)?;
        Ok(SafetensorsFile {
            path,
            file,
            tensors,
        })
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// The tensor of that name, with the name as this file keeps it.
    pub(crate) fn named(&self, name: &str) -> Option<(&str, &TensorEntry)> {
        self.tensors
            .get_key_value(name)
            .map(|(name, entry)| (name.as_str(), entry))
    }

    /// Names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads bytes at `offset` of the file.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        read_at(&self.file, &self.path, offset, out)
    }
}

fn read_at(file: &Mapped, path: &Path, offset: u64, out: &mut [u8]) -> Result<()> {
    file.read(offset, out)
        .map_err(|source| Error::io("read", path, source))
}

/// Makes this file's errors.
struct Fault<'a> {
    path: &'a Path,
}

impl Fault<'_> {
    fn of(&self, expected: impl Into<String>, got: impl Into<String>) -> Error {
        self.at(printable_path(self.path), expected, got)
    }

    fn tensor(&self, name: &str, expected: impl Into<String>, got: impl Into<String>) -> Error {
        let place = format!("{}: tensor {}", printable_path(self.path), printable(name));
        self.at(place, expected, got)
    }

    fn at(&self, place: String, expected: impl Into<String>, got: impl Into<String>) -> Error {
        Error::input("safetensors", place, expected, got, "fetch the file again")
    }
}

/// Ranges against shapes, against each other and against the tensors' bytes.
fn check_ranges(
    raw: HashMap<String, RawEntry>,
    data_start: u64,
    data_bytes: u64,
    fault: &Fault,
) -> Result<HashMap<String, TensorEntry>> {
    // By name last, so that the message does not depend on the order of the map.
    let mut order: Vec<(&str, &RawEntry)> = raw.iter().map(|(n, e)| (n.as_str(), e)).collect();
    order.sort_unstable_by_key(|(name, entry)| (entry.data_offsets, *name));
    for (name, entry) in &order {
        let [begin, end] = entry.data_offsets;
        if begin > end {
            return Err(fault.tensor(
                name,
                "begin <= end",
                format!("data_offsets [{begin}, {end}]"),
            ));
        }
        if end > data_bytes {
            let expected = format!("data within the file's {data_bytes} bytes of tensors");
            return Err(fault.tensor(name, expected, format!("data_offsets [{begin}, {end}]")));
        }
        let bits = entry
            .shape
            .iter()
            .try_fold(entry.dtype.bits(), |product, dim| product.checked_mul(*dim));
        let shown = || format!("{} {:?}", entry.dtype.name(), entry.shape);
        match bits {
            Some(bits) if bits.is_multiple_of(8) && bits / 8 == end - begin => {}
            Some(bits) => {
                let expected = format!("{} bits for {}", bits, shown());
                return Err(fault.tensor(name, expected, format!("{} bytes", end - begin)));
            }
            None => {
                let got = format!("{}, more bits than a 64-bit number counts", shown());
                return Err(fault.tensor(name, "a shape within the file", got));
            }
        }
    }
    let mut previous = ("the header", 0);
    for (name, entry) in &order {
        let [begin, end] = entry.data_offsets;
        if begin != previous.1 {
            let fault_kind = if begin < previous.1 {
                "overlap"
            } else {
                "hole"
            };
            let expected = format!("data from byte {}, the end of {}", previous.1, previous.0);
            let expected = printable(&expected);
            return Err(fault.tensor(name, expected, format!("byte {begin}: {fault_kind}")));
        }
        previous = (name, end);
    }
    if previous.1 != data_bytes {
        let expected = format!("{} bytes of tensors, as the header says", previous.1);
        return Err(fault.of(expected, format!("{data_bytes}: trailing bytes")));
    }
    let tensors = raw.into_iter().map(|(name, entry)| {
        let [begin, end] = entry.data_offsets;
        let entry = TensorEntry {
            dtype: entry.dtype,
            shape: entry.shape,
            offset: data_start + begin,
            bytes: end - begin,
        };
        (name, entry)
    });
    Ok(tensors.collect())
}

/// A header as it stands in the file; only its JSON has been checked.
struct Header(HashMap<String, RawEntry>);

struct RawEntry {
    dtype: Dtype,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Header, A::Error> {
        let mut tensors = HashMap::new();
        let mut metadata = false;
        while let Some(name) = entries.next_key::<String>()? {
            if name == "__metadata__" {
                if metadata {
                    return Err(duplicate(&name));
                }
                metadata = true;
                entries.next_value::<Metadata>()?;
                continue;
            }
            if name.is_empty() || name.len() > NAME_BYTES_MAX {
                let length = name.len();
                return Err(A::Error::custom(format!(
                    "a tensor's name of {length} bytes, expected 1 to {NAME_BYTES_MAX}"
                )));
            }
            if tensors.len() == TENSORS_MAX {
                return Err(A::Error::custom(format!("more than {TENSORS_MAX} tensors")));
            }
            match tensors.entry(name) {
                Entry::Occupied(entry) => return Err(duplicate(entry.key())),
                Entry::Vacant(slot) => {
                    let entry = entries.next_value_seed(EntrySeed { name: slot.key() })?;
                    slot.insert(entry);
                }
            }
        }
        Ok(Header(tensors))
    }
}

fn duplicate<E: serde::de::Error>(key: &str) -> E {
    E::custom(format!("duplicate key {}", printable(key)))
}

/// Reads one tensor's entry, naming the tensor in its errors.
struct EntrySeed<'a> {
    name: &'a str,
}

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = RawEntry;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<RawEntry, D::Error> {
        let name = self.name;
        deserializer
            .deserialize_map(self)
            .map_err(|error| D::Error::custom(format!("tensor {}: {error}", printable(name))))
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = RawEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<RawEntry, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(key) = entries.next_key::<String>()? {
            let repeated = match key.as_str() {
                "dtype" => dtype.replace(entries.next_value::<String>()?).is_some(),
                "shape" => shape
                    .replace(entries.next_value::<Whole<RANK_MAX>>()?)
                    .is_some(),
                "data_offsets" => offsets.replace(entries.next_value::<Whole<2>>()?).is_some(),
                other => {
                    let shown = printable(other);
                    return Err(A::Error::custom(format!("unknown key {shown}")));
                }
            };
            if repeated {
                return Err(duplicate(&key));
            }
        }
        let missing = |key| A::Error::custom(format!("{key} is missing"));
        let name = dtype.ok_or_else(|| missing("dtype"))?;
        let known = DTYPES.iter().find(|(known, ..)| *known == name);
        let Some((_, dtype, _)) = known else {
            let list = DTYPES.map(|(name, ..)| name).join(" ");
            let shown = printable(&name);
            return Err(A::Error::custom(format!("dtype {shown}; known: {list}")));
        };
        let offsets = offsets.ok_or_else(|| missing("data_offsets"))?.0;
        let data_offsets = offsets.try_into().map_err(|offsets: Vec<u64>| {
            let count = offsets.len();
            A::Error::custom(format!("data_offsets of {count} numbers, expected 2"))
        })?;
        Ok(RawEntry {
            dtype: *dtype,
            shape: shape.ok_or_else(|| missing("shape"))?.0,
            data_offsets,
        })
    }
}

/// At most `MAX` whole numbers.
struct Whole<const MAX: usize>(Vec<u64>);

impl<'de, const MAX: usize> Deserialize<'de> for Whole<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(WholeVisitor::<MAX>)
    }
}

struct WholeVisitor<const MAX: usize>;

impl<'de, const MAX: usize> Visitor<'de> for WholeVisitor<MAX> {
    type Value = Whole<MAX>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of whole numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Whole<MAX>, A::Error> {
        let mut numbers = Vec::new();
        while let Some(number) = items.next_element::<u64>()? {
            if numbers.len() == MAX {
                return Err(A::Error::custom(format!(
                    "a list of more than {MAX} numbers"
                )));
            }
            numbers.push(number);
        }
        Ok(Whole(numbers))
    }
}

/// `__metadata__`: strings to strings, no key twice, nothing kept.
struct Metadata;

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MetadataVisitor)
    }
}

struct MetadataVisitor;

impl<'de> Visitor<'de> for MetadataVisitor {
    type Value = Metadata;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Metadata, A::Error> {
        let mut keys = std::collections::HashSet::new();
        while let Some(key) = entries.next_key::<String>()? {
            entries.next_value::<StringValue>()?;
            if keys.len() == TENSORS_MAX {
                return Err(A::Error::custom(format!("more than {TENSORS_MAX} keys")));
            }
            if keys.contains(&key) {
                return Err(duplicate(&key));
            }
            keys.insert(key);
        }
        Ok(Metadata)
    }
}

struct StringValue;

impl<'de> Deserialize<'de> for StringValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(StringVisitor)
    }
}

struct StringVisitor;

impl Visitor<'_> for StringVisitor {
    type Value = StringValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, _: &str) -> Result<StringValue, E> {
        Ok(StringValue)
    }
}
