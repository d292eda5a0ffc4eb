//! Sources of data: paths, or the weighted sources of a mixture.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::one_or_more::Entry;
use crate::invalid::Invalid;

/// Maximum number of sources of a mixture.
const MAX_SOURCES: usize = 1000;
/// Weights of a mixture. Their sum is finite, and no source's share of it is rounded to zero.
const WEIGHTS: RangeInclusive<f64> = 1e-100..=1e100;

/// A path or glob, with its weight if it is part of a mixture.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSource {
    /// The path or glob.
    pub path: String,
    /// Share of the sequences, relative to the other sources; `None` outside mixtures.
    pub weight: Option<f64>,
}

/// A source of a mixture, as it is written.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(inline))]
pub(super) struct Weighted {
    path: String,
    weight: f64,
}

/// The forms that users may write, for the schema.
#[cfg(feature = "schema")]
#[derive(schemars::JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "describes the form; values are read by the visitor, which has better messages")]
pub(super) enum Forms {
    One(String),
    More(Vec<String>),
    Mixture(Vec<Weighted>),
}

impl<T: Into<String>> From<T> for DataSource {
    fn from(path: T) -> Self {
        Self { path: path.into(), weight: None }
    }
}

impl Serialize for DataSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.weight {
            None => self.path.serialize(serializer),
            Some(weight) => Weighted { path: self.path.clone(), weight }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for DataSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OneSource)
    }
}

impl Entry<'_> for DataSource {
    const EXPECTED: &'static str = "a string, a list of strings, or a list of tables with path and weight";
}

struct OneSource;

impl<'de> Visitor<'de> for OneSource {
    type Value = DataSource;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, or a table with path and weight")
    }

    fn visit_str<E>(self, path: &str) -> Result<Self::Value, E> {
        Ok(path.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut path, mut weight) = (None, None);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "path" => path = Some(map.next_value()?),
                "weight" => weight = Some(map.next_value()?),
                other => {
                    let message = format!("`{other}` is not a key of a source, which has path and weight");
                    return Err(A::Error::custom(message));
                }
            }
        }
        let path = path.ok_or_else(|| A::Error::missing_field("path"))?;
        let weight = weight.ok_or_else(|| A::Error::missing_field("weight"))?;
        Ok(DataSource { path, weight: Some(weight) })
    }
}

/// Checks the weights of a mixture.
pub(super) fn check(key: &'static str, sources: &[DataSource]) -> Result<(), Invalid> {
    if sources.iter().all(|source| source.weight.is_none()) {
        return Ok(());
    }
    if sources.len() > MAX_SOURCES {
        let problem = format!("a mixture of {} sources", sources.len());
        return Err(Invalid::new(key, problem, format!("at most {MAX_SOURCES}")));
    }
    for DataSource { path, weight } in sources {
        let problem = match weight {
            None => format!("{path} has no weight, but other sources have"),
            Some(weight) if !WEIGHTS.contains(weight) => format!("{path} has the weight {weight:?}"),
            Some(_) => continue,
        };
        return Err(Invalid::new(
            key,
            problem,
            format!(
                "a number from {:e} to {:e} for each source of a mixture",
                WEIGHTS.start(),
                WEIGHTS.end()
            ),
        ));
    }
    for (index, DataSource { path, .. }) in sources.iter().enumerate() {
        // It would be read twice in the same order, under one name.
        if sources[..index].iter().any(|other| Path::new(&other.path) == Path::new(path)) {
            let expected = "each source once, with the sum of its weights".into();
            return Err(Invalid::new(key, format!("{path} is in the mixture twice"), expected));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::DataSection;

    fn train(json: &str) -> Result<Vec<DataSource>, String> {
        let section = serde_json::from_str::<DataSection>(&format!("{{\"train\": {json}}}"));
        section.map(|data| data.train).map_err(|error| error.to_string())
    }

    #[test]
    fn data_is_one_string_a_list_or_a_mixture() {
        assert_eq!(train(r#""tokens""#).unwrap(), ["tokens".into()]);
        assert_eq!(train(r#"["a", "b"]"#).unwrap(), ["a".into(), "b".into()]);
        let mixture = r#"[{"path":"a","weight":0.5},{"path":"b","weight":3.0}]"#;
        let read = train(mixture).unwrap();
        let expected = [("a", 0.5), ("b", 3.0)]
            .map(|(path, weight)| DataSource { path: path.into(), weight: Some(weight) });
        assert_eq!(read, expected);
        assert_eq!(serde_json::to_string(&read).unwrap(), mixture);
        let error = train("3").unwrap_err();
        assert!(error.contains("expected a string, a list of strings, or a list of tables"), "{error}");
        let error = train("[3]").unwrap_err();
        assert!(error.contains("expected a string, or a table with path and weight"), "{error}");
        assert!(train(r#"[{"path": "a"}]"#).unwrap_err().contains("missing field `weight`"));
        assert!(
            train(r#"[{"path": "a", "wieght": 1}]"#)
                .unwrap_err()
                .contains("`wieght` is not a key of a source")
        );
    }

    #[test]
    fn weights_are_positive_and_all_sources_of_a_mixture_have_one() {
        let problem = |weights: &[Option<f64>]| {
            let source =
                |(path, weight): (&str, &Option<f64>)| DataSource { path: path.into(), weight: *weight };
            let sources: Vec<DataSource> = ["a", "b", "a/"].into_iter().zip(weights).map(source).collect();
            check("data.train", &sources).err().map(|invalid| invalid.problem)
        };
        assert_eq!(problem(&[None, None]), None);
        assert_eq!(problem(&[Some(0.1), Some(30.0)]), None);
        for weight in [0.0, -1.0, 1e-300, 1e300, f64::NAN, f64::INFINITY] {
            let text = format!("b has the weight {weight:?}");
            assert_eq!(problem(&[Some(1.0), Some(weight)]), Some(text));
        }
        assert_eq!(problem(&[Some(1.0), None]).unwrap(), "b has no weight, but other sources have");
        assert_eq!(problem(&[Some(0.1), Some(1.0), Some(2.0)]).unwrap(), "a/ is in the mixture twice");
    }
}
