//! Converts rows of Parquet files, with nested columns, to lines of JSON.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use serde_json::Value;

use super::rows::{catch, lines, share};

/// Returns the rows of a file as objects with those of its columns that have one of these names.
pub(super) fn rows(path: &Path, columns: &[&str], read: &Arc<AtomicU64>) -> io::Result<Box<dyn Read>> {
    let file = File::open(path)?;
    let reader = catch(|| SerializedFileReader::new(file))?.map_err(io::Error::other)?;
    let schema = reader.metadata().file_metadata().schema();
    let is_wanted = |field: &&Arc<Type>| columns.contains(&field.name());
    let wanted: Vec<Arc<Type>> = schema.get_fields().iter().filter(is_wanted).cloned().collect();
    if wanted.is_empty() {
        let names: Vec<String> = schema
            .get_fields()
            .iter()
            .take(20)
            .map(|field| format!("`{}`", field.name().escape_debug()))
            .collect();
        return Err(io::Error::other(format!(
            "there is no column of chats, only {}; expected `messages`, `prompt` and `completion`, or `text`",
            names.join(", ")
        )));
    }
    let projection = Type::group_type_builder(schema.name()).with_fields(wanted).build();
    let count = reader.metadata().file_metadata().num_rows().max(1).unsigned_abs();
    let rows = RowIter::from_file_into(Box::new(reader));
    let mut rows = rows.project(Some(projection.map_err(io::Error::other)?)).map_err(io::Error::other)?;
    let (bytes, mut row, read) = (path.metadata()?.len(), 0, Arc::clone(read));
    Ok(lines(move |line| {
        let Some(next) = catch(|| rows.next())? else {
            read.store(bytes, Ordering::Relaxed);
            return Ok(false);
        };
        let next = next.map_err(io::Error::other)?;
        object(next.get_column_iter(), line)?;
        row += 1;
        read.store(share(bytes, row, count), Ordering::Relaxed);
        Ok(true)
    }))
}

/// Writes an object. Every row has all fields of the schema, so those without a value are left out.
fn object<'a>(fields: impl Iterator<Item = (&'a String, &'a Field)>, out: &mut Vec<u8>) -> io::Result<()> {
    out.push(b'{');
    let mut first = true;
    for (name, field) in fields.filter(|(_, field)| !matches!(field, Field::Null)) {
        if !std::mem::take(&mut first) {
            out.push(b',');
        }
        write(&Value::from(name.as_str()), out)?;
        out.push(b':');
        json(field, out)?;
    }
    out.push(b'}');
    Ok(())
}

fn json(field: &Field, out: &mut Vec<u8>) -> io::Result<()> {
    let value = match field {
        Field::Group(row) => return object(row.get_column_iter(), out),
        Field::ListInternal(list) => {
            out.push(b'[');
            for (index, element) in list.elements().iter().enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                json(element, out)?;
            }
            out.push(b']');
            return Ok(());
        }
        Field::MapInternal(map) => {
            let name = |key: &Field| match key {
                Field::Str(text) => text.clone(),
                other => other.to_string(),
            };
            let pairs: Vec<(String, &Field)> =
                map.entries().iter().map(|(key, value)| (name(key), value)).collect();
            return object(pairs.iter().map(|(key, value)| (key, *value)), out);
        }
        Field::Str(text) => Value::from(text.as_str()),
        Field::Bytes(bytes) => Value::from(bytes.as_utf8().map_err(io::Error::other)?),
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
        Field::Float(value) => Value::from(*value),
        Field::Double(value) => Value::from(*value),
        // Dates, times and decimals as text.
        other => Value::from(other.to_string()),
    };
    write(&value, out)
}

fn write(value: &Value, out: &mut Vec<u8>) -> io::Result<()> {
    serde_json::to_writer(out, value).map_err(io::Error::other)
}
