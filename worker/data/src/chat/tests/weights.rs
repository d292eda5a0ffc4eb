//! Rows that other trainers leave out of the loss, or train on with a weight.

use super::*;

/// Rows of every form with further fields.
fn rows(more: &str) -> [String; 5] {
    let user = r#"{"role": "user", "content": "a"}"#;
    let answer = r#"{"role": "assistant", "content": "b"}"#;
    [
        format!(r#"{{"messages": [{user}, {answer}], {more}}}"#),
        format!(
            r#"{{{more}, "conversations": [{{"from": "human", "value": "a"}}, {{"from": "gpt", "value": "b"}}]}}"#
        ),
        format!(r#"{{"prompt": [{user}], "completion": [{answer}], {more}}}"#),
        format!(r#"{{"prompt": "a", "completion": " b", {more}}}"#),
        format!(r#"{{"text": "b", {more}}}"#),
    ]
}

#[test]
fn rows_that_are_left_out_of_the_loss_are_refused() {
    for (field, expected) in [
        (r#""weight": 0"#, "`weight` of the row is 0, but rows have no weights"),
        (r#""weight": 0.5"#, "`weight` of the row is 0.5"),
        (r#""weight": 1e-9"#, "`weight` of the row is 1e-09"),
        (r#""weight": "0""#, "`weight` of the row is 0"),
        (r#""weight": false"#, "`weight` of the row is False"),
        (r#""train": false"#, "`train` of the row is False"),
        (r#""train_on": false"#, "`train_on` of the row is False"),
        (r#""mask": 1"#, "`mask` of the row is 1"),
        (r#""loss_weight": 0"#, "`loss_weight` of the row is 0"),
        (r#""loss_mask": [0, 1]"#, "`loss_mask` of the row is [0, 1]"),
        (r#""label": false"#, "`label` of the row is False"),
        (r#""label": 0"#, "`label` of the row is 0"),
        (r#""label": 0.0"#, "`label` of the row is 0.0"),
        (r#""label": -1"#, "`label` of the row is -1"),
        (r#""label": "False""#, "`label` of the row is False"),
        (r#""label": "undesirable""#, "`label` of the row is undesirable"),
    ] {
        for row in rows(field) {
            let error = trained_on(CHATML, &row).unwrap_err();
            assert!(error.contains(expected), "{row}: {error}");
        }
    }
}

#[test]
fn rows_that_count_once_and_fields_about_something_else_are_read() {
    for field in [
        r#""weight": 1"#,
        r#""weight": 1.0"#,
        r#""weight": null"#,
        r#""weight": true"#,
        r#""weight": "70 kg""#,
        r#""train": true"#,
        r#""train": "yes""#,
        r#""train": null"#,
        r#""loss": 0.7"#,
        r#""loss_weight": 1.0"#,
        r#""loss_mask": null"#,
        r#""label": true"#,
        r#""label": 1"#,
        r#""label": "1.0""#,
        r#""label": "negative""#,
        r#""label": null"#,
    ] {
        for row in rows(field) {
            assert!(trained_on(CHATML, &row).is_ok(), "{row}");
        }
    }
}

#[test]
fn message_that_is_not_trained_on_by_another_key_is_refused() {
    let row = r#"{"messages": [{"role": "user", "content": "a", "train_on": false},
        {"role": "assistant", "content": "b", "train_on": true}]}"#;
    assert_eq!(trained_on(CHATML, row).unwrap(), ["b<|im_end|>"]);
    let error = trained_on(CHATML, &row.replace("true", "false")).unwrap_err();
    assert!(error.contains("`messages[1].train_on` is False, which is not read"), "{error}");
}
