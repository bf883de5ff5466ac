"""``phantom generate`` as a user calls it."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from phantom_parallel import FFN, GPT, FFNConfig, GPTConfig, save_model
from phantom_parallel.families.gpt.generation import generate
from tests.cli.commands import DEADLINE, answered, refused
from tests.cli.commands import phantom as command
from tests.families.gpt.test_generation import continued
from tests.families.gpt.test_model import filled

phantom = partial(command, "generate")
SIZES = {"vocab": 256, "dim": 32, "layers": 2, "heads": 4, "hidden": 48, "context": 40}
PROMPT = "def main("


def model_of(strategy: str = "phantom", **changes) -> GPT:
    cut = {"blocks": 4, "ghosts": 3} if strategy == "phantom" else {}
    return filled(GPTConfig(**(SIZES | cut | {"strategy": strategy} | changes)), dtype=torch.float32)


@pytest.fixture
def folder(tmp_path) -> Path:
    save_model(model_of(), tmp_path / "model")
    return tmp_path


def expected(tokens: int) -> list[int]:
    """By plain float64 maths."""
    return continued(model_of().config, torch.tensor([list(PROMPT.encode())]))[0][:tokens]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_text_and_what_it_cost_as_json(folder, capfd, ranks):
    given = "--model", folder / "model", "--prompt", PROMPT, "--tokens", 8, "--against", "megatron", "--turns", 2
    report = answered(capfd, "generate", *given, *(["--ranks", 2] if ranks > 1 else []))
    assert (report["ranks"], report["prompts"], report["prompt_lengths"]) == (ranks, [PROMPT], [len(PROMPT)])
    assert report["tokens"] == [expected(8)]
    assert report["texts"] == [bytes(expected(8)).decode(errors="replace")]
    assert list(report["measured"]) == ["phantom", "megatron"]
    for model in report["measured"].values():
        for phase in ("prefill", "decode"):
            assert (model[phase]["bytes"] > 0) == (ranks > 1)
            assert model[phase]["seconds"] > 0


def test_text_is_on_stdout_after_one_prefill_and_its_time_on_stderr(folder, capfd, monkeypatch):
    forwards = []
    logits = GPT.logits
    monkeypatch.setattr(GPT, "logits", lambda *args, **settings: forwards.append(0) or logits(*args, **settings))
    assert phantom("--model", folder / "model", "--prompt", PROMPT, "--tokens", "8") == 0
    captured = capfd.readouterr()
    assert captured.out == bytes(expected(8)).decode(errors="replace") + "\n"
    assert captured.err.splitlines()[-1].startswith("[8 tokens, first after ")
    assert "prefill" not in captured.err
    assert len(forwards) == 8


def test_text_ends_at_stop_texts_and_at_the_stop_tokens_of_the_model(folder, capfd):
    tokens = expected(8)
    text = bytes(tokens).decode(errors="replace")
    given = ["--model", folder / "model", "--prompt", PROMPT, "--tokens", "8"]
    assert phantom(*given, "--stop", text[3:5], "not in it") == 0
    assert capfd.readouterr().out == text[: text.index(text[3:5])] + "\n"
    for stops in (tokens[4], [tokens[4], 255]):
        (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        report = answered(capfd, "generate", *given)
        end = tokens.index(tokens[4])
        assert report["tokens"] == [tokens[: end + 1]]
        assert report["texts"] == [bytes(tokens[:end]).decode(errors="replace")]


def test_sampled_texts_from_a_file(folder, capfd):
    (folder / "prompt.txt").write_text(PROMPT)
    given = ("--model", folder / "model", "--prompt-file", folder / "prompt.txt", "--tokens", "6", "--batch", "3")
    sampled = (*given, "--temperature", "0.8", "--top-k", "50", "--top-p", "0.9", "--seed", "5")
    report = answered(capfd, "generate", *sampled)
    prompt = torch.tensor([list(PROMPT.encode())] * 3)
    made = generate(model_of(), prompt, tokens=6, temperature=0.8, top_k=50, top_p=0.9, seed=5)
    assert report["tokens"] == made.tokens.tolist()
    assert len({tuple(row) for row in report["tokens"]}) == 3
    assert phantom(*sampled) == 0
    first, *others = report["texts"]
    shown = "".join(f"--- {index} of 3 ---\n{text}\n" for index, text in enumerate(others, 2))
    assert capfd.readouterr().out == f"{first}\n{shown}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--ranks", "3"], "blocks=4: run on 2 or 4 ranks"),
        (["--prompt", "a", "--tokens", "40"], "context of 40"),
        (["--prompt", ""], "the prompt is empty"),
        ([], "--prompt-file"),
        (["--chat"], "chat_template.jinja"),
        (["--prompt-file", "{folder}/model/model.safetensors"], "UTF-8"),
        (["--prompt", "a", "--model", "{folder}"], "is not a model folder"),
        (["--prompt", "a", "--model", "{folder}/ffn"], "phantom infer"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_before_any_rank_starts(folder, capfd, monkeypatch, arguments, message):
    monkeypatch.setattr(
        "phantom_parallel.families.gpt.generation.launch", lambda *_, **__: pytest.fail("ranks were started")
    )
    save_model(FFN(FFNConfig(8, 2, "dense")), folder / "ffn")
    chosen = [argument.replace("{folder}", str(folder)) for argument in arguments]
    model = [] if "--model" in chosen else ["--model", folder / "model"]
    assert message in refused(capfd, "generate", *model, *chosen)


def test_a_process_that_was_started_joins(folder, capfd, monkeypatch):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    assert phantom("--model", folder / "model", "--prompt", PROMPT, "--tokens", "4") == 0
    assert capfd.readouterr().out == bytes(expected(4)).decode(errors="replace") + "\n"
    message = refused(capfd, "generate", "--model", folder / "model", "--prompt", PROMPT, "--ranks", "2")
    assert "1 processes were started, 2 are needed" in message


TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"


@pytest.fixture
def chat_model(tmp_path) -> Path:
    save_model(model_of(context=4000), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


def answer(prompt: str, tokens: int) -> str:
    made = generate(model_of(context=4000), torch.tensor([list(prompt.encode())]), tokens=tokens)
    return bytes(made.tokens[0].tolist()).decode(errors="replace")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_conversation_keeps_its_history(chat_model, ranks, monkeypatch, capfd):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nand?\n"))
    assert phantom("--model", chat_model, "--chat", "--tokens", "5", "--ranks", ranks) == 0
    first, printed = answer("u:hi;", 5), capfd.readouterr()
    assert printed.out == f"{first}\n{answer(f'u:hi;a:{first};u:and?;', 5)}\n"
    assert printed.err.count("[5 tokens, ") == 2


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, *arguments], os.environ | {"TERM": "dumb"})
        self.output, self._seen = b"", 0

    def wait_for(self, text: bytes) -> None:
        """Read until ``text`` comes after what was waited for before; empty for anything."""
        end = time.monotonic() + DEADLINE
        while (text not in self.output[self._seen :]) if text else len(self.output) == self._seen:
            assert time.monotonic() < end, self.output
            if select.select([self._file], [], [], 0.1)[0]:
                self.output += os.read(self._file, 4096)
        self._seen = self.output.index(text, self._seen) + len(text)

    def type(self, keys: bytes) -> None:
        os.write(self._file, keys)

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(chat_model, ranks):
    terminal = Terminal(
        "-m", "phantom_parallel.cli.main", "generate", "--model", str(chat_model), "--chat", "--ranks", ranks
    )
    try:
        for _ in range(2):
            terminal.wait_for(b"> ")
            terminal.type(b"hi\n")
            terminal.wait_for(b"hi\r\n")
            terminal.wait_for(b"")  # the answer has begun
            terminal.type(b"\x03")
            terminal.wait_for(b" token")
        terminal.wait_for(b"> ")
        terminal.type(b"\x04")
        assert terminal.exit_code() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(terminal.pid, signal.SIGKILL)


def test_control_characters_are_escaped_on_a_terminal_only(folder, capfd, monkeypatch):
    decode = "phantom_parallel.families.gpt.text.ByteTokenizer.decode"
    monkeypatch.setattr(decode, lambda self, tokens: "\x1b[31m" * len(tokens))
    given = ("--model", folder / "model", "--prompt", PROMPT, "--tokens", "1")
    assert phantom(*given) == 0
    assert "\x1b[31m" in capfd.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert phantom(*given) == 0
    assert "\x1b" not in capfd.readouterr().out
