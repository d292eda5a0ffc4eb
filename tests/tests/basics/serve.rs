//! `xlaunch serve`: requests of clients to a model that was just trained.

use std::io::{Read, Write};
use std::sync::Barrier;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use xlaunch_tests::served::{Served, answer};
use xlaunch_tests::{Job, Process, wait_for};

xlaunch_harness::tests! {
    served_texts_are_those_of_generate,
    answers_are_the_same_alone_and_among_other_requests,
    prompts_are_scored_as_texts_and_as_ids,
    streamed_text_is_the_whole_text_in_pieces,
    requests_that_cannot_be_answered_are_refused_with_reasons,
    context_of_the_server_can_be_shorter_than_the_models,
    clients_need_the_token_and_a_loopback_host,
    hanging_clients_and_large_bodies_keep_no_client_out,
    cancelled_request_frees_its_place,
    server_ends_on_signals_with_requests_in_progress;
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const MODEL: &str = "runs/train/latest";
/// The path ends with a slash, as a shell completes it; the name of the model does not.
const ARGS: [&str; 6] = ["serve", "runs/train/latest/", "--device", "cpu", "--listen", "127.0.0.1:0"];

fn trained(steps: &str) -> Job {
    let job = Job::new();
    job.run_ok(&["--set", &format!("train.steps={steps}"), "--set", "train.lr=1e-2"]);
    job
}

fn serve(job: &Job) -> Served {
    Served::spawn(&mut job.command(&ARGS))
}

fn generate(job: &Job, args: &[&str]) -> Vec<Value> {
    let command = [&["generate", MODEL, "--device", "cpu", "--json", "--max-tokens", "12"], args].concat();
    let output = Process::spawn(&mut job.command(&command)).wait();
    assert_eq!(output.code, 0, "{}", output.stderr);
    output.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn texts(reply: &Value) -> Vec<&str> {
    reply["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect()
}

fn served_texts_are_those_of_generate() {
    let job = trained("150");
    let server = serve(&job);
    assert_eq!(server.get("/health").json(), json!({"status": "ok"}));
    let models = server.get("/v1/models").json();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!(MODEL), &json!(32)));
    for name in ["runs/train/latest", "runs%2Ftrain%2Flatest"] {
        assert_eq!(server.get(&format!("/v1/models/{name}")).json(), models["data"][0], "{name}");
    }
    let other = server.get("/v1/models/gpt-4");
    assert_eq!((other.status, &other.error()["code"]), (404, &json!("model_not_found")), "{other:?}");
    let greedy = &generate(&job, &["--prompt", "line 4", "--temperature", "0"])[0]["text"];
    for prompt in [json!("line 4"), json!([108, 105, 110, 101, 32, 52]), json!(["line 4"])] {
        let body =
            json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "model": MODEL, "user": "me"});
        let reply = server.post_ok(COMPLETIONS, &body);
        assert_eq!(texts(&reply), [greedy.as_str().unwrap()]);
        let usage = json!({"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18});
        assert_eq!((&reply["usage"], &reply["object"]), (&usage, &json!("text_completion")));
        assert_eq!(
            (&reply["model"], &reply["choices"][0]["finish_reason"]),
            (&json!(MODEL), &json!("length"))
        );
        assert_eq!(reply["choices"][0]["logprobs"], Value::Null);
    }
    let drawn = generate(&job, &["--prompt", "line", "--samples", "3", "--seed", "4", "--top-p", "0.9"]);
    let body = json!({"prompt": "line", "n": 3, "seed": 4, "top_p": 0.9, "max_tokens": 12});
    let reply = server.post_ok(COMPLETIONS, &body);
    assert_eq!(texts(&reply), drawn.iter().map(|it| it["text"].as_str().unwrap()).collect::<Vec<_>>());
    // Without a seed, texts differ.
    let all: Vec<Value> =
        (0..8).map(|_| server.post_ok(COMPLETIONS, &json!({"prompt": "q", "max_tokens": 20}))).collect();
    assert!(all.iter().any(|reply| texts(reply) != texts(&all[0])), "{all:?}");
    let same = json!({"prompt": vec!["q"; 8], "max_tokens": 20});
    let reply = server.post_ok(COMPLETIONS, &same);
    assert!(texts(&reply).iter().any(|text| *text != texts(&reply)[0]), "{reply}");
    // The text ends before a stop string, and is repeated after its prompt.
    let greedy = greedy.as_str().unwrap();
    let stop = &greedy[4..7];
    let body = json!({"prompt": "line 4", "max_tokens": 12, "temperature": 0, "stop": [stop], "echo": true});
    let reply = server.post_ok(COMPLETIONS, &body);
    assert_eq!(texts(&reply), [format!("line 4{}", &greedy[..greedy.find(stop).unwrap()])]);
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
}

fn answers_are_the_same_alone_and_among_other_requests() {
    let job = trained("20");
    let server = serve(&job);
    // Prompts of all lengths, with and without log-probabilities, greedy and drawn.
    let body = |index: usize| {
        let prompt: String =
            "line 17: 289 and 3\nline".chars().cycle().skip(index).take(1 + index * 7 % 20).collect();
        let mut body = json!({"prompt": prompt, "max_tokens": 3 + index % 10, "seed": index});
        if index.is_multiple_of(3) {
            body["temperature"] = json!(0);
        }
        if index.is_multiple_of(2) {
            (body["logprobs"], body["echo"]) = (json!(3), json!(index.is_multiple_of(4)));
        }
        body
    };
    let choices = |index: usize| server.post_ok(COMPLETIONS, &body(index))["choices"].take();
    let alone: Vec<Value> = (0..48).map(choices).collect();
    for _ in 0..3 {
        let start = Barrier::new(48);
        std::thread::scope(|scope| {
            for (index, alone) in alone.iter().enumerate() {
                let (start, choices) = (&start, &choices);
                scope.spawn(move || {
                    start.wait();
                    assert_eq!(&choices(index), alone, "request {index}");
                });
            }
        });
    }
}

fn prompts_are_scored_as_texts_and_as_ids() {
    let job = trained("150");
    let server = serve(&job);
    let scores = |prompt: Value, max_tokens: usize| {
        let body = json!({
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, "echo": true,
        });
        server.post_ok(COMPLETIONS, &body)["choices"].take()
    };
    let text = "line 4: 16 and 4\nline 5: 25 and ";
    let ids: Vec<u8> = text.bytes().collect();
    assert_eq!(ids.len(), 32, "the whole context");
    let found = scores(json!(text), 1);
    assert_eq!(found, scores(json!(ids), 1));
    let logprobs = &found[0]["logprobs"];
    let list = |name: &str| logprobs[name].as_array().unwrap().clone();
    assert_eq!(list("tokens").len(), 33);
    assert_eq!(list("text_offset"), (0..33).map(Value::from).collect::<Vec<_>>());
    let (own, top) = (list("token_logprobs"), list("top_logprobs"));
    assert_eq!((&own[0], &top[0]), (&Value::Null, &Value::Null));
    let number = |value: &Value| value.as_f64().unwrap();
    for place in 1..33 {
        let alternatives = top[place].as_object().unwrap();
        let token = list("tokens")[place].as_str().unwrap().to_owned();
        assert!(
            (2..=3).contains(&alternatives.len()) && alternatives[&token] == own[place],
            "{alternatives:?}"
        );
        assert!(alternatives.values().map(number).map(f64::exp).sum::<f64>() <= 1.0 + 1e-6);
    }
    // The next token is the most likely one, and the prompt can be scored without it.
    let largest = top[32].as_object().unwrap().values().map(number).fold(f64::NEG_INFINITY, f64::max);
    assert_eq!(number(&own[32]), largest);
    let only = scores(json!([ids]), 0);
    assert_eq!(only[0]["logprobs"]["token_logprobs"].as_array().unwrap()[..], own[..32]);
    assert_eq!((&only[0]["text"], &only[0]["finish_reason"]), (&json!(text), &json!("length")));
    // The last character is incomplete and belongs to the prompt.
    let incomplete = [&b"line 4: "[..], b"\xe6\x97"].concat();
    let repeated = scores(json!(incomplete), 1);
    let body = json!({"prompt": incomplete, "max_tokens": 1, "temperature": 0});
    let new = server.post_ok(COMPLETIONS, &body)["choices"][0]["text"].take();
    let new = new.as_str().unwrap();
    assert!(new.len() == 1 && new.is_ascii(), "{new:?}");
    assert_eq!(repeated[0]["text"], format!("line 4: \u{fffd}{new}"));
    assert_eq!(repeated[0]["logprobs"]["text_offset"], json!([0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9]));
}

fn streamed_text_is_the_whole_text_in_pieces() {
    let job = trained("150");
    let server = serve(&job);
    let mut body =
        json!({"prompt": ["line", "l"], "max_tokens": 12, "temperature": 0, "logprobs": 1, "echo": true});
    let whole = server.post_ok(COMPLETIONS, &body);
    (body["stream"], body["stream_options"]) = (json!(true), json!({"include_usage": true}));
    let answer = server.post(COMPLETIONS, &body);
    let events: Vec<&str> = answer.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!((answer.status, events.last()), (200, Some(&"[DONE]")), "{answer:?}");
    let parts: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let (last, parts) = parts.split_last().unwrap();
    assert_eq!((&last["usage"], &last["choices"]), (&whole["usage"], &json!([])));
    for (index, expected) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let own = || parts.iter().map(|part| &part["choices"][0]).filter(|choice| choice["index"] == index);
        assert!(own().count() > 10);
        assert_eq!(
            own().map(|choice| choice["text"].as_str().unwrap()).collect::<String>(),
            expected["text"]
        );
        let logprobs: Vec<Value> = own()
            .flat_map(|choice| choice["logprobs"]["token_logprobs"].as_array().unwrap().clone())
            .collect();
        assert_eq!(Value::from(logprobs), expected["logprobs"]["token_logprobs"]);
        let ends: Vec<&Value> =
            own().map(|choice| &choice["finish_reason"]).filter(|it| !it.is_null()).collect();
        assert_eq!(ends, [&json!("length")]);
    }
}

fn requests_that_cannot_be_answered_are_refused_with_reasons() {
    let job = trained("1");
    let server = serve(&job);
    let refused = |path: &str, body: Value, status: u16, param: &str, why: &str| {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, status, "{body}: {answer:?}");
        let error = answer.error();
        let kind = &error["type"];
        assert_eq!(
            (&error["param"], kind),
            (&json!(param), &json!("invalid_request_error")),
            "{body}: {error}"
        );
        assert!(error["message"].as_str().unwrap().contains(why), "{why}: {error}");
    };
    let long = "x".repeat(33);
    refused(
        COMPLETIONS,
        json!({"prompt": long}),
        400,
        "prompt",
        "has 33 tokens, but the model's context has 32",
    );
    let body = json!({"prompt": ["a", "bbb"], "max_tokens": 31});
    refused(COMPLETIONS, body, 400, "prompt", "prompt 2 has 3 tokens and asks for 31 more");
    refused(COMPLETIONS, json!({"prompt": [1, 256]}), 400, "prompt", "token id 256 is not below 256");
    refused(
        COMPLETIONS,
        json!({"prompt": "a", "presence_penalty": 1}),
        400,
        "presence_penalty",
        "not supported",
    );
    refused(COMPLETIONS, json!({"prompt": "a", "temperatur": 1}), 400, "temperatur", "not supported");
    refused(COMPLETIONS, json!({"prompt": "a", "temperature": -1}), 400, "temperature", "at least 0");
    refused(COMPLETIONS, json!({"prompt": "a", "model": "gpt-4"}), 404, "model", "`gpt-4` does not exist");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    refused(CHAT, chat, 400, "messages", "the model has no chat template");
    let status = |method: &str, path: &str, kind: &str, body: &str| {
        let headers = format!("Host: localhost\r\nContent-Type: {kind}\r\n");
        let answer = server.request(method, path, &headers, body);
        assert!(answer.error()["message"].is_string(), "{answer:?}");
        answer.status
    };
    assert_eq!(status("POST", COMPLETIONS, "application/json", "{\"prompt\": "), 400);
    assert_eq!(status("POST", COMPLETIONS, "text/plain", "{\"prompt\": \"a\"}"), 415);
    let encoded = |encoding: &str| {
        let headers =
            format!("Host: localhost\r\nContent-Type: application/json\r\nContent-Encoding: {encoding}\r\n");
        server.request("POST", COMPLETIONS, &headers, "{\"prompt\": \"a\", \"max_tokens\": 1}")
    };
    let compressed = encoded("gzip");
    assert!(
        compressed.status == 415 && compressed.error()["message"].to_string().contains("`gzip`"),
        "{compressed:?}"
    );
    assert_eq!(encoded("Identity").status, 200);
    assert_eq!(status("GET", COMPLETIONS, "application/json", ""), 405);
    assert_eq!(status("GET", "/v1/engines", "application/json", ""), 404);
    let deep = format!("{{\"prompt\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(status("POST", COMPLETIONS, "application/json", &deep), 400);
    // The server still works.
    assert_eq!(server.post(COMPLETIONS, &json!({"prompt": "a", "max_tokens": 32})).status, 200);
}

fn context_of_the_server_can_be_shorter_than_the_models() {
    let job = trained("1");
    let start = |context: &str| job.command(&[&ARGS[..], &["--context", context]].concat());
    let server = Served::spawn(&mut start("12"));
    assert_eq!(server.get("/v1/models").json()["data"][0]["max_model_len"], 12);
    let body = |max_tokens: usize| json!({"prompt": "line 4", "max_tokens": max_tokens, "temperature": 0});
    // The last token needs no room.
    assert_eq!(server.post_ok(COMPLETIONS, &body(7))["usage"]["completion_tokens"], 7);
    let refused = server.post(COMPLETIONS, &body(8));
    assert_eq!((refused.status, &refused.error()["code"]), (400, &json!("context_length_exceeded")));
    for context in ["0", "33"] {
        let refused = Process::spawn(&mut start(context)).wait();
        assert_eq!(refused.code, 2, "{}", refused.stderr);
        let expected = format!("--context {context} is out of range: expected 1 to 32, the model's own");
        assert!(refused.stderr.contains(&expected), "{}", refused.stderr);
    }
}

fn clients_need_the_token_and_a_loopback_host() {
    let job = trained("1");
    let refused = |args: &[&str], part: &str| {
        let output = Process::spawn(&mut job.command(&[&ARGS[..4], args].concat())).wait();
        assert_eq!((output.code, output.stdout.as_str()), (2, ""), "{output:?}");
        assert!(output.stderr.contains(part), "{part}: {}", output.stderr);
    };
    refused(&["--listen", "0.0.0.0:0"], "clients need a token");
    for (name, token, part) in [
        ("short", "123", "has 3 bytes, expected at least 16"),
        ("tabs", "01234567\t89abcdef\n", "characters that clients cannot send"),
    ] {
        job.write(name, token);
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(job.path().join(name), mode).unwrap();
        refused(&["--listen", "0.0.0.0:0", "--token-file", name], part);
    }
    for name in ["localhost", ":8000", "8000"] {
        refused(&["--listen", name], "expected HOST:PORT, such as 127.0.0.1:8000");
    }

    let open = Served::spawn(&mut job.command(&[&ARGS[..4], &["--listen", "localhost:0"]].concat()));
    for (host, status) in [("localhost", 200), ("127.0.0.1:80", 200), ("evil.example", 403)] {
        assert_eq!(
            open.request("GET", "/v1/models", &format!("Host: {host}\r\n"), "").status,
            status,
            "{host}"
        );
    }
    let taken = open.address.clone();
    refused(&["--listen", &taken], "failed to listen on");

    let args = [&ARGS[..4], &["--listen", "0.0.0.0:0"]].concat();
    let token = "0123456789abcdef";
    let guarded = Served::spawn(job.command(&args).env("XLAUNCH_SERVE_TOKEN", token));
    let port = guarded.address.rsplit(':').next().unwrap().to_owned();
    let guarded = Served { address: format!("127.0.0.1:{port}"), ..guarded };
    for (header, status) in [
        (String::new(), 401),
        ("Authorization: Bearer 0123456789abcdeX\r\n".into(), 401),
        (format!("Authorization: Basic {token}\r\n"), 401),
        (format!("Authorization: Bearer {token}\r\n"), 200),
    ] {
        let answer = guarded.request("GET", "/v1/models", &format!("Host: any.example\r\n{header}"), "");
        assert_eq!(answer.status, status, "{header}");
        assert!(status == 200 || answer.error()["code"] == "invalid_api_key", "{answer:?}");
    }
    assert_eq!(guarded.get("/health").status, 200);
}

fn hanging_clients_and_large_bodies_keep_no_client_out() {
    let job = trained("1");
    let server = serve(&job);
    let mut hanging = Vec::new();
    for number in 0..700 {
        let mut stream = server.connect();
        if number % 2 == 0 {
            let _ = stream.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: loc");
        }
        hanging.push(stream);
    }
    let body = json!({"prompt": "a", "max_tokens": 2});
    assert_eq!(server.post(COMPLETIONS, &body).status, 200);
    // Clients that do not send the body, or do not read the answer.
    let head = "Host: localhost\r\nContent-Type: application/json\r\n";
    for _ in 0..50 {
        let mut stream = server.connect();
        let start = format!("POST {COMPLETIONS} HTTP/1.1\r\n{head}Content-Length: 1000\r\n\r\n{{");
        stream.write_all(start.as_bytes()).unwrap();
        hanging.push(stream);
        hanging.push(server.send("POST", COMPLETIONS, head, &body.to_string()));
    }
    assert_eq!(server.post(COMPLETIONS, &body).status, 200);
    let large = json!({"prompt": "x".repeat(9 << 20)});
    assert_eq!(server.post(COMPLETIONS, &large).status, 413);
    assert_eq!(server.post(COMPLETIONS, &body).status, 200);
}

/// Texts of the cancelled requests would take longer than the test may.
fn cancelled_request_frees_its_place() {
    let job = Job::new();
    job.run_ok(&["--set", "train.steps=1", "--set", "train.batch=1", "--set", "model.seq=4096"]);
    let server = serve(&job);
    let head = "Host: localhost\r\nContent-Type: application/json\r\n";
    let short = json!({"prompt": "a", "max_tokens": 2}).to_string();
    // A request that is not answered in time is cancelled, too.
    let has_status = |wanted: &[u8], seconds: u64| {
        let mut client = server.send("POST", COMPLETIONS, head, &short);
        client.set_read_timeout(Some(Duration::from_secs(seconds))).unwrap();
        let mut status = [0; 12];
        client.read_exact(&mut status).is_ok() && status.ends_with(wanted)
    };
    for stream in [false, true] {
        let all = json!({"prompt": vec!["line"; 1024], "max_tokens": 4000, "stream": stream}).to_string();
        let mut clients = Vec::new();
        wait_for("a full server", || {
            clients.push(server.send("POST", COMPLETIONS, head, &all));
            has_status(b"503", 1).then_some(())
        });
        let busy = answer(server.send("POST", COMPLETIONS, head, &short));
        assert!(busy.error()["message"].as_str().unwrap().contains("4096 texts"), "{busy:?}");
        drop(clients);
        wait_for("a free place", || has_status(b"200", 10).then_some(()));
    }
}

fn server_ends_on_signals_with_requests_in_progress() {
    let job = Job::new();
    job.run_ok(&["--set", "train.steps=1", "--set", "train.batch=1", "--set", "model.seq=4096"]);
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let server = serve(&job);
        let body = json!({"prompt": "a", "max_tokens": 4000, "n": 100, "stream": true}).to_string();
        let head = "Host: localhost\r\nContent-Type: application/json\r\n";
        let mut client = server.send("POST", COMPLETIONS, head, &body);
        let mut first = [0; 200];
        client.read_exact(&mut first).unwrap();
        server.process.signal(signal);
        let Served { process, .. } = server;
        let output = process.wait();
        assert_eq!(output.code, code, "{output:?}");
        let mut rest = Vec::new();
        let _ = client.read_to_end(&mut rest);
    }
}
