//! `xlaunch generate` and `xlaunch eval` in terms of the worker crate: a part of `main.rs`.

use xlaunch_agent::Refusal;
use xlaunch_worker::evaluate as evaluation;
use xlaunch_worker::generate::{self, Completion, Update};
use xlaunch_worker::pretrained;

use crate::trainer::{
    Device, EvaluateCommand, Evaluation, GenerateCommand, Generated, HeldOutLoss, Interrupted, Note,
    PromptInput, Score, TextSink,
};

pub(crate) fn generate(
    command: &GenerateCommand,
    interrupted: Interrupted<'_>,
    note: Note<'_>,
    sink: TextSink<'_>,
) -> Result<(), Refusal> {
    let prompt = |prompt: &PromptInput| match prompt {
        PromptInput::Text(text) => generate::Prompt::Text(text.clone()),
        PromptInput::Chat(messages) => generate::Prompt::Chat(messages.clone()),
    };
    let command = generate::Command {
        model: command.model.clone(),
        tokenizer: command.tokenizer.clone(),
        prompts: command.prompts.iter().map(prompt).collect(),
        samples: command.samples,
        raw: command.raw,
        max_tokens: command.max_tokens,
        temperature: command.temperature,
        top_k: command.top_k,
        top_p: command.top_p,
        seed: command.seed,
        stop: command.stop.clone(),
        device: device(command.device),
        precision: command.precision,
    };
    let mut sink = |prompt: usize, sample: usize, update: Update<'_>| {
        let generated = match update {
            Update::Text(text) => Generated::Text(text),
            Update::Finished(Completion { tokens, reason, time }) => {
                Generated::Finished { tokens, reason: reason.name(), seconds: time.as_secs_f64() }
            }
        };
        sink(prompt, sample, generated);
    };
    generate::run(&command, interrupted, note, &mut sink).map_err(refusal)
}

pub(crate) fn evaluate(
    command: &EvaluateCommand,
    note: Note<'_>,
    interrupted: Interrupted<'_>,
) -> Result<Evaluation, Refusal> {
    let command = evaluation::Command {
        model: command.model.clone(),
        data: command.data.clone(),
        tokens: command.tokens,
        hellaswag: command.hellaswag.clone(),
        device: device(command.device),
        precision: command.precision,
    };
    let found = evaluation::run(&command, note, interrupted).map_err(refusal)?;
    let loss = found.loss.map(|found| {
        let evaluation::Loss { loss, tokens, bits_per_byte } = found;
        HeldOutLoss { loss, tokens, bits_per_byte }
    });
    let score =
        |found: evaluation::hellaswag::Score| Score { questions: found.questions, correct: found.correct };
    Ok(Evaluation { loss, hellaswag: found.hellaswag.map(score) })
}

fn device(device: Device) -> pretrained::Device {
    match device {
        Device::Auto => pretrained::Device::Auto,
        Device::Cuda => pretrained::Device::Cuda,
        Device::Cpu => pretrained::Device::Cpu,
    }
}

fn refusal(refusal: xlaunch_worker::Refusal) -> Refusal {
    Refusal::new(refusal.exit, refusal.message)
}
