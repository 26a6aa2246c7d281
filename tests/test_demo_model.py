"""The model that ships in the package: its folder, its tokenizer, its sums through LLM and through transformers."""

import importlib.util
import json
import random
from os.path import commonprefix
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import pagedkv
from pagedkv import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
FOLDER = Path(pagedkv.__file__).parent / "data" / "demo_model"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def rng():
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


def draw_uniform(rng: random.Random, n: int) -> list[tuple[int, int]]:
    return [(rng.randrange(1000), rng.randrange(1000)) for _ in range(n)]


def draw_short(rng: random.Random, n: int) -> list[tuple[int, int]]:
    """A uniform number of digits: among uniform operands short ones are rare."""
    operand = lambda: rng.randrange(10 ** rng.choice((1, 2, 3)))
    return [(operand(), operand()) for _ in range(n)]


def solved(pairs: list[tuple[int, int]]) -> str:
    return "".join(f"{a}+{b}={a + b};" for a, b in pairs)


def wrong_answers(outputs: list, pairs: list[tuple[int, int]]) -> list[tuple[str, str, str]]:
    return [
        (output.prompt, output.text, output.finish_reason)
        for output, (a, b) in zip(outputs, pairs, strict=True)
        if output.finish_reason != "stop" or output.text != str(a + b)
    ]


def test_folder_has_what_a_checkpoint_needs_in_4_mb():
    sizes = {f.name: f.stat().st_size for f in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= sizes.keys()
    assert sum(sizes.values()) <= 4_000_000


def test_config_weights_and_tokenizer_agree():
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["tie_word_embeddings"]
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.token_to_id("<eos>")

    data = (FOLDER / "model.safetensors").read_bytes()  # 8 bytes of header length, JSON header, the tensors
    header_bytes = int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8 : 8 + header_bytes])
    tensors.pop("__metadata__", None)
    assert {t["dtype"] for t in tensors.values()} == {"BF16"}
    assert tensors["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert "lm_head.weight" not in tensors
    assert 8 + header_bytes + max(t["data_offsets"][1] for t in tensors.values()) == len(data)


def test_tokenizer_is_one_token_a_character(rng):
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = solved(draw_short(rng, 9))
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.encode("473 + 89 =\n").ids == tokenizer.encode("473+89=").ids
    answer = tokenizer.encode("562").ids
    assert tokenizer.decode([*answer, tokenizer.token_to_id("<eos>")]) == "562"
    assert tokenizer.encode("4x7").tokens == ["4", "<unk>", "7"]
    assert tokenizer.encode("").ids == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_through_llm(rng, dtype):
    pairs = draw_uniform(rng, 1000)
    edges = [(473, 89), (0, 0), (999, 999), (999, 1), (1, 999), (555, 445), (0, 999), (90, 9), *draw_short(rng, 92)]
    with LLM(FOLDER, device="cpu", dtype=dtype) as llm:
        outputs = llm.generate([f"{a}+{b}=" for a, b in edges + pairs], GREEDY, use_tqdm=False)
    wrong = wrong_answers(outputs[len(edges) :], pairs)
    assert len(wrong) <= 10, wrong
    wrong = wrong_answers(outputs[: len(edges)], edges)
    assert len(wrong) <= 1, wrong


def test_sums_after_solved_examples_use_the_prefix_cache(rng):
    examples = solved(draw_short(rng, 6))
    pairs = draw_uniform(rng, 100)
    with LLM(FOLDER, device="cpu", block_size=16) as llm:
        prompts, prompt = [f"{examples}{a}+{b}=" for a, b in pairs], f"{examples}1+1="
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        again = llm.generate(prompt, GREEDY, use_tqdm=False)
    wrong = wrong_answers(outputs, pairs) + wrong_answers(again, [(1, 1)])
    assert len(wrong) <= 1, wrong
    shared = max(len(commonprefix([prompt, before])) for before in prompts)  # noqa: RUF071 - a token is a character
    assert again[0].num_cached_tokens == min(shared, len(prompt) - 1) // 16 * 16


def test_sums_through_transformers(rng):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    pairs = draw_short(rng, 100)
    prompts = tokenizer([f"{a}+{b}=" for a, b in pairs], return_tensors="pt", padding=True, return_token_type_ids=False)
    answers = model.generate(**prompts, max_new_tokens=8)[:, prompts["input_ids"].shape[1] :]
    assert (answers == model.generation_config.eos_token_id).any(1).all()
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    wrong = [(pair, text) for pair, text in zip(pairs, texts, strict=True) if text != str(sum(pair))]
    assert len(wrong) <= 1, wrong


def test_training_rows_are_right_sums_with_the_answers_labelled(rng):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    spec = importlib.util.spec_from_file_location("train_demo_model", ROOT / "tools" / "train_demo_model.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    torch.manual_seed(rng.getrandbits(32))
    for tokens, labels in zip(*(t.tolist() for t in tool.training_rows(50, 64, torch.device("cpu"))), strict=True):
        row = "".join(tool.VOCAB[t] for t in tokens)
        end = row.rindex(";") + 1  # the last sum may be cut
        expected = []
        for text in row[:end].removesuffix(";").split(";"):
            question, answer = text.split("=")
            a, b = question.split("+")
            assert answer == str(int(a) + int(b)) and [a, b] == [str(int(a)), str(int(b))]
            expected += [tool.NO_LABEL] * len(question)
            expected += [tool.VOCAB.index(c) for c in answer] + [tool.EOS, tool.NO_LABEL]
        assert labels[:end] == expected
