//! Rows of a .parquet file, as JSON values by column name.
//!
//! - Read row group by row group through the format's own record reader, without arrow; columns of
//!   lists and of structs become lists and objects, so that `messages` columns read as in JSON.
//! - What the file says of itself is not trusted: a broken one is an error that names it.

use std::fs::File;
use std::path::Path;

use parquet::file::reader::{FileReader, SerializedFileReader};

use super::source::{BATCH_ROWS, RawRow, Rows};
use crate::error::{Error, Result, printable};

/// Hands the rows of `path` on in order, as long as more are wanted.
pub(super) fn read_rows(path: &Path, sink: &mut Rows<'_>) -> Result<bool> {
    let wrong = |place: String, error: &dyn std::fmt::Display| {
        let got = printable(&error.to_string());
        Error::input(
            "dataset",
            place,
            "a parquet file",
            got,
            "copy the file again",
        )
    };
    let whole = || path.display().to_string();
    let file = File::open(path).map_err(|error| Error::io("open", path, error))?;
    let reader = SerializedFileReader::new(file).map_err(|error| wrong(whole(), &error))?;
    let rows = reader
        .get_row_iter(None)
        .map_err(|error| wrong(whole(), &error))?;
    let mut batch = Vec::new();
    for (number, row) in (1u64..).zip(rows) {
        let row = row.map_err(|error| wrong(format!("{}:{number}", whole()), &error))?;
        batch.push((number, RawRow::Item(row.to_json_value())));
        if batch.len() == BATCH_ROWS && !sink(std::mem::take(&mut batch))? {
            return Ok(false);
        }
    }
    match batch.is_empty() {
        true => Ok(true),
        false => sink(batch),
    }
}
