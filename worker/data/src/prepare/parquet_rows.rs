//! Converts rows of Parquet files to lines of JSON: a column of strings, or whole rows with nested columns.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parquet::basic::{Compression, ConvertedType, LogicalType, Type as Physical};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::{Type, TypePtr};
use serde::de::IgnoredAny;
use serde_json::Value;

use super::rows::{REFUSED, column_index, lines, quote};

/// Returns the rows of a file as objects with those of its columns that have one of these names, or for which `is_more`
/// is true. Columns of `media` are `true` where they have a value, which may be large and not text.
pub(super) fn objects(
    path: &Path,
    columns: &[&str],
    media: &'static [&str],
    is_more: &dyn Fn(&str) -> bool,
    read: &Arc<AtomicU64>,
) -> io::Result<Box<dyn Read>> {
    let select = |fields: &[TypePtr]| {
        let wanted = |field: &&TypePtr| {
            let name = field.name();
            columns.contains(&name) || media.contains(&name) || is_more(name)
        };
        let wanted: Vec<TypePtr> = fields.iter().filter(wanted).cloned().collect();
        if !wanted.iter().any(|field| columns.contains(&field.name())) {
            let names = fields.iter().take(20).map(|field| format!("`{}`", field.name().escape_debug()));
            let missing = format!(
                "there is no column of chats, only {}; expected `messages`, `prompt` and `completion`, `instruction` \
                 and `output`, or `text`",
                names.collect::<Vec<_>>().join(", ")
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, missing));
        }
        Ok(wanted)
    };
    rows(path, select, read, |row, types, line| {
        let fields = members(row, types).map(|(name, field, kind)| {
            let is_media = media.contains(&name.as_str());
            (name, if is_media && has_value(field) { &Field::Bool(true) } else { field }, kind)
        });
        object(fields, line)
    })
}

fn has_value(field: &Field) -> bool {
    match field {
        Field::Null => false,
        Field::ListInternal(list) => list.elements().iter().any(has_value),
        Field::Str(text) => !text.is_empty(),
        _ => true,
    }
}

/// Returns a column of strings.
pub(super) fn column(path: &Path, column: &str, read: &Arc<AtomicU64>) -> io::Result<Box<dyn Read>> {
    let select = |fields: &[TypePtr]| {
        let names = || fields.iter().map(|field| field.name().to_owned()).collect::<Vec<_>>();
        let index = column_index(column, &names())?;
        let field = &fields[index];
        // Writers give this type to a column of a shard that has no value in it.
        let is_empty = field.get_basic_info().logical_type_ref() == Some(&LogicalType::Unknown);
        let is_text = field.is_primitive() && field.get_physical_type() == Physical::BYTE_ARRAY;
        if !is_text && !is_empty {
            let other = format!("the column `{}` is not one of strings", column.escape_debug());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, other));
        }
        Ok(vec![field.clone()])
    };
    rows(path, select, read, |row, types, line| {
        match members(row, types).next() {
            Some((_, field @ Field::Str(_), kind)) if is_json(kind) => json(field, kind, line)?,
            Some((_, Field::Str(text), _)) => quote(text.as_bytes(), line),
            Some((_, Field::Bytes(text), _)) => quote(text.data(), line),
            _ => line.extend_from_slice(b"null"),
        }
        Ok(())
    })
}

/// Returns a line for each row, written from the selected columns.
fn rows(
    path: &Path,
    select: impl FnOnce(&[TypePtr]) -> io::Result<Vec<TypePtr>>,
    read: &Arc<AtomicU64>,
    write: impl Fn(&Row, &[TypePtr], &mut Vec<u8>) -> io::Result<()> + 'static,
) -> io::Result<Box<dyn Read>> {
    let file = File::open(path)?;
    let reader = catch(|| SerializedFileReader::new(file))?.map_err(io::Error::other)?;
    let schema = reader.metadata().file_metadata().schema();
    let selected = select(schema.get_fields())?;
    let chunks = reader.metadata().row_groups().iter().flat_map(|group| group.columns());
    if let Some(name) = chunks.filter_map(|chunk| unsupported(chunk.compression())).next() {
        let other =
            format!("it is compressed with {name}, which is not supported; write it with zstd or snappy");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, other));
    }
    let projection = Type::group_type_builder(schema.name()).with_fields(selected.clone()).build();
    let count = reader.metadata().file_metadata().num_rows().max(1).unsigned_abs();
    let rows = RowIter::from_file_into(Box::new(reader));
    let mut rows = rows.project(Some(projection.map_err(io::Error::other)?)).map_err(io::Error::other)?;
    let (bytes, mut row, read) = (path.metadata()?.len(), 0, Arc::clone(read));
    Ok(lines(move |line| {
        let Some(next) = catch(|| rows.next())? else {
            read.store(bytes, Ordering::Relaxed);
            return Ok(false);
        };
        match write(&next.map_err(io::Error::other)?, &selected, line) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                *line = format!("{REFUSED}{error}").into();
            }
            written => written?,
        }
        // The position of a row in the file is unknown: for progress, all rows count the same.
        row += 1;
        read.store(share(bytes, row, count), Ordering::Relaxed);
        Ok(true)
    }))
}

/// Returns the name of a compression that this program was built without.
fn unsupported(compression: Compression) -> Option<&'static str> {
    match compression {
        Compression::BROTLI(_) => Some("brotli"),
        Compression::LZO => Some("LZO"),
        _ => None,
    }
}

/// Catches panics: the library does not handle all kinds of damage.
fn catch<T>(work: impl FnOnce() -> T) -> io::Result<T> {
    crate::quiet::catch(work).map_err(|panic| io::Error::other(format!("it cannot be decoded: {panic}")))
}

fn share(bytes: u64, row: u64, rows: u64) -> u64 {
    u64::try_from(u128::from(bytes) * u128::from(row.min(rows)) / u128::from(rows)).unwrap_or(bytes)
}

/// Returns the fields of a row, each with its type.
fn members<'a>(
    row: &'a Row,
    types: &'a [TypePtr],
) -> impl Iterator<Item = (&'a String, &'a Field, Option<&'a Type>)> {
    let of = |name: &str| types.iter().find(|kind| kind.name() == name).map(AsRef::as_ref);
    row.get_column_iter().map(move |(name, field)| (name, field, of(name)))
}

/// Returns the types of the members of a group.
fn children(kind: Option<&Type>) -> &[TypePtr] {
    kind.filter(|kind| kind.is_group()).map_or(&[], Type::get_fields)
}

/// Returns the type of the elements of a list. Old writers leave out the group around an element.
fn element(list: Option<&Type>) -> Option<&Type> {
    let repeated = children(list).first()?.as_ref();
    let has_group = repeated.name() != "array" && !repeated.name().ends_with("_tuple");
    match children(Some(repeated)) {
        [only] if has_group => Some(only),
        _ => Some(repeated),
    }
}

/// Returns whether strings of this type contain JSON, as those of the feature `Json` of Hugging Face's `datasets` do.
fn is_json(kind: Option<&Type>) -> bool {
    kind.map(Type::get_basic_info).is_some_and(|info| {
        info.logical_type_ref() == Some(&LogicalType::Json) || info.converted_type() == ConvertedType::JSON
    })
}

/// Writes an object. Every row has all fields of the schema, so those without a value are left out.
fn object<'a>(
    fields: impl Iterator<Item = (&'a String, &'a Field, Option<&'a Type>)>,
    out: &mut Vec<u8>,
) -> io::Result<()> {
    out.push(b'{');
    let mut first = true;
    for (name, field, kind) in fields.filter(|(_, field, _)| !matches!(field, Field::Null)) {
        if !std::mem::take(&mut first) {
            out.push(b',');
        }
        write(&Value::from(name.as_str()), out)?;
        out.push(b':');
        json(field, kind, out).map_err(|error| in_field(name, &error))?;
    }
    out.push(b'}');
    Ok(())
}

/// Adds the name of a field to the reason why its value, or one within it, is not written.
fn in_field(name: &str, error: &io::Error) -> io::Error {
    let (name, reason) = (name.escape_debug(), error.to_string());
    let reason = match reason.strip_prefix('`') {
        Some(inner) => format!("`{name}.{inner}"),
        None => format!("`{name}` {reason}"),
    };
    io::Error::new(error.kind(), reason)
}

fn json(field: &Field, kind: Option<&Type>, out: &mut Vec<u8>) -> io::Result<()> {
    let value = match field {
        Field::Group(row) => return object(members(row, children(kind)), out),
        Field::ListInternal(list) => {
            out.push(b'[');
            for (index, element) in list.elements().iter().enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                json(element, self::element(kind), out)?;
            }
            out.push(b']');
            return Ok(());
        }
        Field::MapInternal(map) => {
            let name = |key: &Field| match key {
                Field::Str(text) => text.clone(),
                other => other.to_string(),
            };
            let value_type = children(kind).first().and_then(|pair| Some(&**children(Some(pair)).get(1)?));
            let pairs: Vec<(String, &Field)> =
                map.entries().iter().map(|(key, value)| (name(key), value)).collect();
            return object(pairs.iter().map(|(key, value)| (key, *value, value_type)), out);
        }
        // A row is a line. Strings of JSON have no line ends.
        Field::Str(text) if is_json(kind) && serde_json::from_str::<IgnoredAny>(text).is_ok() => {
            out.extend(text.bytes().map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { byte }));
            return Ok(());
        }
        Field::Str(text) => Value::from(text.as_str()),
        Field::Bytes(bytes) => match bytes.as_utf8() {
            Ok(text) => Value::from(text),
            Err(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "is not valid UTF-8")),
        },
        Field::Null => Value::Null,
        Field::Bool(value) => Value::from(*value),
        Field::Byte(value) => Value::from(*value),
        Field::Short(value) => Value::from(*value),
        Field::Int(value) => Value::from(*value),
        Field::Long(value) => Value::from(*value),
        Field::UByte(value) => Value::from(*value),
        Field::UShort(value) => Value::from(*value),
        Field::UInt(value) => Value::from(*value),
        Field::ULong(value) => Value::from(*value),
        Field::Float16(value) => return float(f64::from(*value), out),
        Field::Float(value) => return float(f64::from(*value), out),
        Field::Double(value) => return float(*value, out),
        // Dates, times and decimals as text.
        other => Value::from(other.to_string()),
    };
    write(&value, out)
}

fn float(value: f64, out: &mut Vec<u8>) -> io::Result<()> {
    if !value.is_finite() {
        let reason = format!("is {value}, which JSON lacks: write null in its place");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    write(&Value::from(value), out)
}

fn write(value: &Value, out: &mut Vec<u8>) -> io::Result<()> {
    serde_json::to_writer(out, value).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_json_or_an_error_of_their_row() {
        for (field, expected) in [
            (Field::Double(1e-7), "1e-7"),
            (Field::Float(0.5), "0.5"),
            (Field::Float16(Default::default()), "0.0"),
        ] {
            let mut out = Vec::new();
            json(&field, None, &mut out).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
        let inner = Field::Group(Row::new(vec![("b\n".into(), Field::Float(f32::NAN))]));
        let outer = Row::new(vec![("a".into(), inner)]);
        let error = object(members(&outer, &[]), &mut Vec::new()).unwrap_err().to_string();
        assert_eq!(error, r"`a.b\n` is NaN, which JSON lacks: write null in its place");
        let infinite = json(&Field::Double(f64::NEG_INFINITY), None, &mut Vec::new());
        assert!(infinite.unwrap_err().to_string().starts_with("is -inf, "));
    }

    #[test]
    fn compressions_that_this_program_lacks_have_names() {
        assert_eq!(unsupported(Compression::BROTLI(parquet::basic::BrotliLevel::default())), Some("brotli"));
        assert_eq!(unsupported(Compression::SNAPPY), None);
    }
}
