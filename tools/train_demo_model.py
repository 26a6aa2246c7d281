"""Trains the model that ships in pagedkv/data/demo_model: it completes "473+89=" with "562" and stops.

    python tools/train_demo_model.py --out pagedkv/data/demo_model --compile

A tool for developers, with torch and transformers; users never need it. It exists so that nobody has to trust a binary.

The job. All pairs 0..999 + 0..999, decimal digits in plain order, no leading zeros, one token a character. Solved
examples may come before the question ("1+2=3;40+7=47;473+89="), up to max_position_embeddings tokens: prompts that have
examples in common are what prefix caching is for.

The sizes. Plain order wants the sum's first digit before the carries that decide it, so both operands must be aligned
by place and the whole carry chain known at "=": a few layers, each with little to do. Hidden 128 with four layers is
0.79 million parameters, 1.6 MB in bf16. The heads are ordinary ones (dim 64, two query heads per KV head), so that the
demo runs the same kernels as a real checkpoint.

The arithmetic. Every forward and backward pass runs in pure bf16 on the bf16 weights that will be stored; AdamW moves a
float32 master copy. So the stored weights are right in bf16, and in float32, which only takes rounding noise away.

The training data. Uniform pairs are nearly all of three digits, so half of the operands get a uniform number of digits
instead; and in a quarter of the sums most places add up to 9, which is where carries run far. A row is as many sums as
fit, joined by ";". The loss is on the answers alone; each one's last digit is labelled <eos> although the row goes on.

The result, with the defaults and --compile, on one NVIDIA H200 with torch 2.11 and transformers 5.17: 12,000 steps in
2.2 minutes; 13 of the last 14 evaluations, from step 5,500 on, were without a mistake. All 1,000,000 pairs are right,
<eos> included, in bf16 and in float32 arithmetic, and so are 100,000 random pairs after 1, 4 and 8 solved examples. A
right token leads the best wrong one by 9.6 logits or more, which is far above bf16's rounding. The pairs asked are
pairs trained on: the model shows an engine at work, not that a model generalizes.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

VOCAB = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "=", ";"]
PAD, EOS, UNK, ZERO, PLUS, EQUALS, SEMICOLON = (VOCAB.index(t) for t in ("<pad>", "<eos>", "<unk>", "0", "+", "=", ";"))
NO_LABEL = -100
LIMIT = 1000  # operands are 0 .. LIMIT - 1
POSITIONS = 128  # max_position_embeddings
WIDTH = 13  # characters of the longest sum with its separator: "999+999=1998;"


# --- data


def draw_operands(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """n pairs [n], mixed as the header says."""

    def operand() -> torch.Tensor:
        by_length = torch.rand(n, device=device) * 10 ** torch.randint(1, 4, (n,), device=device)
        uniform = torch.rand(n, device=device) * LIMIT
        return torch.where(torch.rand(n, device=device) < 0.5, uniform, by_length).long().clamp(max=LIMIT - 1)

    a, b = operand(), operand()
    chained = torch.zeros_like(b)
    for power in (1, 10, 100):
        nine = torch.rand(n, device=device) < 0.7
        chained += torch.where(nine, 9 - a // power % 10, b // power % 10) * power
    return a, torch.where(torch.rand(n, device=device) < 0.25, chained, b)


def digits(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of x's decimal digits, right-aligned [n, width], and which of them are not leading zeros."""
    powers = 10 ** torch.arange(width - 1, -1, -1, device=x.device)
    shown = (x[:, None] >= powers) | (powers == 1)
    return ZERO + x[:, None] // powers % 10, shown


def sums(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """"a+b=c;" in WIDTH columns each: token ids, next-token labels (answers only), and which columns are in use."""
    n = a.numel()
    (ta, sa), (tb, sb), (tc, sc) = digits(a, 3), digits(b, 3), digits(a + b, 4)
    column = lambda token: torch.full((n, 1), token, device=a.device)
    yes = torch.ones((n, 1), dtype=torch.bool, device=a.device)
    tokens = torch.cat([ta, column(PLUS), tb, column(EQUALS), tc, column(SEMICOLON)], 1)
    used = torch.cat([sa, yes, sb, yes, sc, yes], 1)
    first = tc.gather(1, sc.int().argmax(1, keepdim=True))  # what "=" must be followed by
    blank = torch.full((n, 7), NO_LABEL, device=a.device)
    labels = torch.cat([blank, first, tc[:, 1:], column(EOS), column(NO_LABEL)], 1)
    return tokens, labels, used


def left_align(x: torch.Tensor, used: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    """Moves the used columns of every row to the left, in order: [rows, length], cut or filled at the end."""
    place = torch.where(used, used.cumsum(1) - 1, length).clamp(max=length)  # column `length` takes what is left over
    return x.new_full((x.shape[0], length + 1), fill).scatter_(1, place, x)[:, :length]


def training_rows(rows: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [rows, length]: fresh sums until every row is full."""
    per_row = length // 6 + 1  # "0+0=0;" is the shortest
    tokens, labels, used = (t.view(rows, per_row * WIDTH) for t in sums(*draw_operands(rows * per_row, device)))
    return left_align(tokens, used, length, PAD), left_align(labels, used, length, NO_LABEL)


# --- evaluation


@torch.inference_mode()
def evaluate(model: Qwen3ForCausalLM, a: torch.Tensor, b: torch.Tensor, num_examples: int = 0) -> tuple[int, float]:
    """How many of the pairs greedy decoding answers exactly, <eos> included, after num_examples random solved sums; and
    the smallest lead, in logits, of a right token over the best wrong one.

    Greedy decoding is right exactly where every argmax is right given the right tokens before it: one pass a batch.
    """
    right, lead = 0, math.inf
    for pair in zip(a.split(16384), b.split(16384), strict=True):
        n = pair[0].numel()
        tokens, labels, used = sums(*pair)
        if num_examples:
            before, _, before_used = (t.view(n, -1) for t in sums(*draw_operands(n * num_examples, a.device)))
            blank = torch.full_like(before, NO_LABEL)
            tokens, labels, used = (torch.cat(t, 1) for t in ((before, tokens), (blank, labels), (before_used, used)))
        length = tokens.shape[1]
        tokens, labels = left_align(tokens, used, length, PAD), left_align(labels, used, length, NO_LABEL)
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        asked = labels != NO_LABEL
        target = labels.clamp(min=0)[..., None]
        leads = logits.gather(2, target)[..., 0] - logits.scatter(2, target, -math.inf).amax(2)
        leads = leads.masked_fill(~asked, math.inf).amin(1)
        right += int((leads > 0).sum())
        lead = min(lead, float(leads.min()))
    return right, lead


def final_report(model: Qwen3ForCausalLM, random_pairs: int) -> dict[str, object]:
    """Every pair alone, and random pairs after 1, 4 and 8 solved sums, in bf16 and in float32 arithmetic."""
    every = torch.arange(LIMIT * LIMIT, device=model.device)
    report = {}
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        for num_examples in (0, 1, 4, 8):
            pairs = torch.randint(LIMIT * LIMIT, (random_pairs,), device=model.device) if num_examples else every
            right, lead = evaluate(model, pairs // LIMIT, pairs % LIMIT, num_examples)
            name = f"{str(dtype).removeprefix('torch.')}, {num_examples} examples before"
            report[name] = {"right": right, "of": pairs.numel(), "smallest_lead": round(lead, 3)}
    model.to(torch.bfloat16)
    return report


# --- the folder


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json: a token a character, whitespace dropped. tokenizer_config.json is for transformers."""
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCAB)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s"), "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>",
              "unk_token": "<unk>", "model_max_length": POSITIONS, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_folder(model: Qwen3ForCausalLM, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # save_pretrained leaves it readable by its owner alone
    write_tokenizer(folder)


# --- training


def build_model(args: argparse.Namespace) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(VOCAB), hidden_size=args.hidden, intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=POSITIONS, tie_word_embeddings=True, initializer_range=0.05,
        pad_token_id=PAD, bos_token_id=None, eos_token_id=EOS,
    )
    return Qwen3ForCausalLM(config).to(args.device, torch.bfloat16)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    model = build_model(args)
    weights = list(model.parameters())
    master = [w.detach().float().clone() for w in weights]
    for m in master:
        m.grad = torch.zeros_like(m)
    matrices, norms = ([m for m in master if (m.ndim == 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=device.type == "cuda")

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)

    step_loss = torch.compile(loss_of) if args.compile else loss_of
    num_weights = sum(w.numel() for w in weights)
    print(f"{num_weights} weights, {args.steps} steps of {args.rows} x {args.length} tokens on {device}", flush=True)

    best, start = -1, time.time()
    for step in range(args.steps):
        minutes = (time.time() - start) / 60
        done = max(step / args.steps, minutes / args.minutes)  # a slow machine anneals early instead of not at all
        if done >= 1:
            print(f"stopped at step {step} by --minutes", flush=True)
            break
        rate = args.lr * min(1, (step + 1) / 300) * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = step_loss(*training_rows(args.rows, args.length, device))
        loss.backward()
        torch._foreach_copy_([m.grad for m in master], [w.grad for w in weights])
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, master)
        model.zero_grad()
        if step % args.report == args.report - 1 or step == args.steps - 1:
            pairs = torch.randint(LIMIT, (2, args.report_pairs), device=device)
            right, lead = evaluate(model, *pairs)
            print(f"step {step + 1} {minutes:.2f} min: loss {loss.item():.5f}, lr {rate:.2e}, "
                  f"{right / args.report_pairs:.4%} right, smallest lead {lead:.2f}", flush=True)
            if right >= best:  # a later checkpoint is annealed further: prefer it among equals
                best = right
                write_folder(model, args.out)

    training_minutes = (time.time() - start) / 60
    model = Qwen3ForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16).to(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    report = {"minutes": round(training_minutes, 2), "weights": num_weights, "torch": torch.__version__, "device": name}
    report |= final_report(model, args.report_pairs)
    print(json.dumps(report, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=20251121)
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--minutes", type=float, default=30.0, help="stop by then; the learning rate falls in time")
    parser.add_argument("--rows", type=int, default=1024, help="rows a step")
    parser.add_argument("--length", type=int, default=POSITIONS, help="tokens a row")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--compile", action="store_true", help="torch.compile the step (needs Triton and a C compiler)")
    parser.add_argument("--report", type=int, default=500, help="steps between evaluations, each of which may save")
    parser.add_argument("--report-pairs", type=int, default=100_000)
    logging.disable_progress_bar()
    train(parser.parse_args())


if __name__ == "__main__":
    main()
