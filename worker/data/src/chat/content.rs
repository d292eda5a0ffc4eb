//! The forms in which a template accepts the content of messages: a string, a list of parts, or either.
//!
//! Most templates write only strings, and would print a list as Python does. Those of image models may write only
//! lists, and nothing of a string. Rendering short chats shows which. If the template writes lists, a list is passed
//! on, and the template decides what is between the parts, as in `transformers`. Otherwise the parts are joined, as
//! most templates do.

use minijinja::value::{Value, ValueKind};

use super::row::has_role;
use super::{ASSISTANT, message_of};

/// Text that a template writes as it is: it has neither letters nor white space.
const MARK: &str = "7351902846";
/// Value of a part that no template reads. It is written only where a list is printed.
const UNREAD_MARK: &str = "6482091537";

/// Content that a template writes in messages of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Text,
    Parts,
    Either,
    /// The template writes nothing of the content.
    Nothing,
}

/// The forms of content that a template takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContentForms {
    system: Form,
    user: Form,
    assistant: Form,
}

impl ContentForms {
    /// Finds out which forms a template takes. `render` returns `None` if it rejects a chat.
    pub(super) fn of(render: &dyn Fn(&Value) -> Option<String>) -> Self {
        let list =
            |part: &[(&'static str, &'static str)]| Value::from(vec![Value::from_pairs(part.to_vec())]);
        let marked = [("type", "text"), ("text", MARK), ("unread", UNREAD_MARK)];
        let form = |chat: &dyn Fn(Value) -> Vec<Value>| {
            let (text, parts) =
                (render(&chat(Value::from(MARK)).into()), render(&chat(list(&marked)).into()));
            let is_rejected = text.is_none() && parts.is_none();
            let writes_text = text.is_some_and(|text| text.contains(MARK));
            let writes_parts = parts.is_some_and(|text| text.contains(MARK) && !text.contains(UNREAD_MARK));
            match (writes_text, writes_parts) {
                (true, true) => Form::Either,
                (false, true) => Form::Parts,
                (true, false) => Form::Text,
                // The template says itself why it rejects a chat.
                (false, false) if is_rejected => Form::Text,
                (false, false) => Form::Nothing,
            }
        };
        let user = form(&|content| vec![message_of("user", content)]);
        let question = || {
            let is_list = user == Form::Parts;
            message_of("user", if is_list { list(&[("type", "text"), ("text", "a")]) } else { "a".into() })
        };
        // Templates may leave out the messages of these roles.
        let other = |form: Form| if form == Form::Nothing { user } else { form };
        Self {
            system: other(form(&|content| vec![message_of("system", content), question()])),
            user,
            assistant: other(form(&|content| vec![question(), message_of(ASSISTANT, content)])),
        }
    }

    /// Returns a message with its content in a form that the template writes.
    ///
    /// # Errors
    /// The reason, if it is the text of a user that the template would leave out.
    pub(super) fn adapt(&self, message: &Value) -> Result<Value, String> {
        let form = if has_role(message, "system") {
            self.system
        } else if has_role(message, ASSISTANT) {
            self.assistant
        } else {
            self.user
        };
        let content = message.get_attr("content").unwrap_or_default();
        match (form, content.kind()) {
            (Form::Parts, ValueKind::String) => {
                let part = Value::from_pairs([("type", Value::from("text")), ("text", content)]);
                Ok(with_content(message, Value::from(vec![part])))
            }
            (Form::Text, ValueKind::Seq) => {
                let parts = content.try_iter().into_iter().flatten();
                let texts = parts.filter_map(|part| part.get_attr("text").ok()?.to_str());
                Ok(with_content(message, texts.map(|text| text.to_string()).collect::<String>().into()))
            }
            (Form::Nothing, ValueKind::String | ValueKind::Seq) if has_role(message, "user") => {
                Err("the chat template writes nothing of the user's text, neither as a string nor as a list of parts; \
                     use another template"
                    .into())
            }
            _ => Ok(message.clone()),
        }
    }
}

/// Returns a chat of texts, to probe templates with. Roles alternate, starting with the user.
pub(super) fn probe(texts: &[&str]) -> Vec<Value> {
    let roles = ["user", ASSISTANT].into_iter().cycle();
    roles.zip(texts).map(|(role, text)| message_of(role, Value::from(*text))).collect()
}

fn with_content(message: &Value, content: Value) -> Value {
    let pair = |key: Value| {
        let is_content = key.as_str() == Some("content");
        let value = if is_content { content.clone() } else { message.get_item(&key).unwrap_or_default() };
        (key, value)
    };
    Value::from_pairs(message.try_iter().into_iter().flatten().map(pair))
}

#[cfg(test)]
mod tests {
    use minijinja::value::Serde;
    use serde_json::{Value as Json, json};

    use crate::chat::{Template, Value};

    /// Renders a chat whose contents are strings, and the same with lists of one part.
    fn both(template: &str, roles: &[&str]) -> [Result<String, String>; 2] {
        let template = Template::new(template, []).unwrap();
        let chat = |content: &dyn Fn(&str) -> Json| {
            let message = |role: &&str| json!({"role": role, "content": content(&format!(" {role}'s <é> "))});
            let messages = Value::from(Serde(roles.iter().map(message).collect::<Json>()));
            template.render_prompt(&messages, &Value::default())
        };
        [chat(&|text| json!(text)), chat(&|text| json!([{"type": "text", "text": text}]))]
    }

    fn parts(template: &str, content: &Json) -> Result<String, String> {
        let messages = Value::from(Serde(json!([{"role": "user", "content": content}])));
        Template::new(template, []).unwrap().render_prompt(&messages, &Value::default())
    }

    const STRINGS: &str = "{% for m in messages %}{{ m.role + ':' + m.content + ';' }}{% endfor %}";
    const PRINTED: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    const LISTS: &str = "{% for m in messages %}{{ m.role }}:{% for part in m.content %}\
                         {% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}";
    const EITHER: &str = "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}\
                          {% for part in m.content %}[{{ part['text'] | trim }}]{% endfor %}{% endif %};{% endfor %}";

    #[test]
    fn content_is_written_whether_the_template_takes_strings_or_lists() {
        let roles = ["system", "user", "assistant", "tool"];
        let expected =
            "system: system's <é> ;user: user's <é> ;assistant: assistant's <é> ;tool: tool's <é> ;";
        for template in [STRINGS, PRINTED, LISTS] {
            assert_eq!(both(template, &roles).map(Result::unwrap), [expected, expected], "{template}");
        }
        let [text, list] = both(EITHER, &roles).map(Result::unwrap);
        assert_eq!(text, expected);
        assert_eq!(
            list,
            "system:[system's <é>];user:[user's <é>];assistant:[assistant's <é>];tool:[tool's <é>];"
        );
        // One that takes lists of a user alone.
        let mixed = "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}{{ part.text }}\
                     {% endfor %}{% else %}{{ '<' + m.content + '>' }}{% endif %};{% endfor %}";
        let expected = "< system's <é> >; user's <é> ;< assistant's <é> >;";
        assert_eq!(both(mixed, &roles[..3]).map(Result::unwrap), [expected, expected]);
    }

    #[test]
    fn template_decides_what_is_between_parts() {
        let content = json!([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]);
        assert_eq!(parts(STRINGS, &content).unwrap(), "user:a b;");
        assert_eq!(parts(LISTS, &content).unwrap(), "user:a b;");
        assert_eq!(parts(EITHER, &content).unwrap(), "user:[a][b];");
    }

    #[test]
    fn text_that_the_template_leaves_out_is_refused() {
        let pictures =
            "{% for m in messages %}{% for part in m.content %}{{ part.image }}{% endfor %}{% endfor %}";
        for refused in both(pictures, &["user"]) {
            assert!(refused.unwrap_err().contains("writes nothing of the user's text"));
        }
        // Other roles may be left out, and a template may reject a chat.
        let users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}";
        assert_eq!(both(users, &["system", "user"]).map(Result::unwrap), [" user's <é> ", " user's <é> "]);
        for refused in both("{{ raise_exception('no chats today') }}", &["user"]) {
            assert!(refused.unwrap_err().contains("no chats today"));
        }
        for (content, why) in [
            (
                json!([{"type": "image"}]),
                "`messages[0].content[0]` is of type `image`; only `text` is supported",
            ),
            (json!([{"type": "text"}]), "`messages[0].content[0]` has no `text`"),
            (json!(3), "`messages[0].content` is a number"),
        ] {
            assert_eq!(parts(LISTS, &content).unwrap_err().split("; expected").next(), Some(why));
        }
    }
}
