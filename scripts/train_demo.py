"""Make the demo of datasets/movielens: semantic IDs, and a small Qwen3 over them with its tokenizer.

    python scripts/train_demo.py                      # about 20 minutes on one core; docs/demo.md has the figures
    python scripts/train_demo.py --out /tmp/demo      # elsewhere than into the repository

Two phases. The first holds out the last *two* items of every user, trains on the rest and measures the loss on the
second-to-last item after each epoch: that decides the number of epochs. The second starts afresh and trains for that
many epochs on everything but the last item. The semantic IDs come from the first phase's data. The last item, the
test target, is used once, at the end, to print the recall. The same seed, machine and versions give the same files.

Needs torch and transformers (the ``hf`` extra).
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# With another number of threads numpy's linear algebra rounds differently, and k-means then ends up elsewhere.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, dropout, log_softmax

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "datasets" / "movielens"
sys.path.insert(0, str(DEMO))

import ml100k
import semantic_ids

IntArray = NDArray[np.int32]
SPECIAL_TOKENS = ("<pad>", "<bos>", "<unk>")
PAD, BOS, _ = range(len(SPECIAL_TOKENS))
LEVEL_NAMES = "abc"
IGNORE = -100  # cross_entropy skips such targets
EVAL_BATCH = 32
CONTEXT = 1024


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result besides the data."""

    seed: int = 17
    codebook: tuple[int, ...] = (32, 32, 64)
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 384
    window: int = 50  # items of a training sequence, and of a history when recommending
    batch: int = 32
    max_epochs: int = 16
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.2
    item_dropout: float = 0.1  # share of a training sequence's items that are left out, drawn anew each epoch


def token_ids(codes: IntArray, codebook: tuple[int, ...]) -> IntArray:
    """[N, L] token of each code: the special tokens first, then the codes of level 1, of level 2, and so on."""
    first = len(SPECIAL_TOKENS) + np.concatenate(([0], np.cumsum(codebook)[:-1]))
    ids: IntArray = (codes + first).astype(np.int32)
    return ids


def windows(rows: list[IntArray], recipe: Recipe, generator: np.random.Generator) -> list[IntArray]:
    """One epoch: every history cut into runs of at most ``window`` items at a random phase, some items left out."""
    pieces = []
    for history in rows:
        start = int(generator.integers(min(recipe.window, len(history)))) if len(history) > recipe.window else 0
        for piece in np.split(history, np.arange(start, len(history), recipe.window)):
            kept = piece[generator.random(len(piece)) >= recipe.item_dropout]
            if len(kept) > 1:
                pieces.append(kept)
    return pieces


def to_batch(pieces: list[IntArray], tokens: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, target) int64 [B, T]: BOS and the items' tokens; each position's target is the token after it."""
    width = max(len(piece) for piece in pieces) * tokens.shape[1]
    full = np.full((len(pieces), width + 1), PAD, np.int64)
    full[:, 0] = BOS
    for row, piece in enumerate(pieces):
        flat = tokens[piece].ravel()
        full[row, 1 : len(flat) + 1] = flat
    targets = np.where(full[:, 1:] == PAD, IGNORE, full[:, 1:])
    return torch.from_numpy(full[:, :-1].copy()), torch.from_numpy(targets)


def new_model(recipe: Recipe) -> Any:
    """A Qwen3ForCausalLM with dropout on the embeddings and on what each attention and MLP block adds."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=len(SPECIAL_TOKENS) + sum(recipe.codebook),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=BOS,
        eos_token_id=None,
        pad_token_id=PAD,
        initializer_range=0.05,
    )
    model = Qwen3ForCausalLM(config)

    def drop(module: torch.nn.Module, _inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
        if isinstance(output, tuple):
            return (dropout(output[0], recipe.dropout, module.training), *output[1:])
        return dropout(output, recipe.dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
    return model


@torch.no_grad()
def next_item_loss(model: Any, history: list[IntArray], following: IntArray, tokens: IntArray) -> float:
    """Mean negative log-probability of the whole SID of ``following[u]`` after ``history[u]``, in nats."""
    model.eval()
    levels, total = tokens.shape[1], 0.0
    for start in range(0, len(history), 64):
        pieces = [
            np.append(past, item)
            for past, item in zip(history[start : start + 64], following[start : start + 64], strict=True)
        ]
        inputs, targets = to_batch(pieces, tokens)
        for row, piece in enumerate(pieces):
            targets[row, : (len(piece) - 1) * levels] = IGNORE
        logits = model(inputs).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        total += loss.item()
    return total / len(history)


def train(
    history: list[IntArray], tokens: IntArray, recipe: Recipe, epochs: int, following: IntArray | None
) -> tuple[Any, list[float]]:
    """A model trained on ``history`` for ``epochs`` epochs, and the loss on ``following`` after each, if given.

    The learning rate falls along a cosine over ``recipe.max_epochs``, however many epochs are run, so that a second
    run of fewer epochs passes through the same rates.
    """
    generator = np.random.default_rng(recipe.seed)
    model = new_model(recipe)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.98)
    )
    losses: list[float] = []
    step = 0
    for epoch in range(1, epochs + 1):
        began, total = time.perf_counter(), 0.0
        model.train()
        pieces = windows(history, recipe, generator)
        order = generator.permutation(len(pieces))
        starts = range(0, len(pieces), recipe.batch)
        for start in starts:
            inputs, targets = to_batch([pieces[at] for at in order[start : start + recipe.batch]], tokens)
            loss = cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, step, (epoch - 1 + start / len(pieces)) / recipe.max_epochs)
            optimizer.step()
            total += loss.item()
        line = f"epoch {epoch:3d}  training loss per token {total / len(starts):.4f}"
        if following is not None:
            losses.append(next_item_loss(model, [past[-recipe.window :] for past in history], following, tokens))
            line += f"  validation loss per item {losses[-1]:.4f}"
        print(f"{line}  {time.perf_counter() - began:.0f} s", flush=True)
    return model.eval(), losses


def learning_rate(recipe: Recipe, step: int, done: float) -> float:
    """Linear warm-up, then a cosine from the full rate to 2 % of it as ``done`` goes from 0 to 1."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
    return recipe.learning_rate * min(step / recipe.warmup_steps, cosine)


@torch.no_grad()
def recommend(model: Any, history: list[IntArray], codes: IntArray, recipe: Recipe, beam: int) -> IntArray:
    """[U, beam] item rows, best first, seen items excluded, -1 where none is left: a plain constrained beam search.

    Independent of xgr's own search on purpose: docs/demo.md compares the two.
    """
    item_at = np.full(recipe.codebook, -1, np.int32)
    item_at[tuple(codes.T)] = np.arange(len(codes))
    lists = np.full((len(history), beam), -1, np.int32)
    for start in range(0, len(history), EVAL_BATCH):
        seen = history[start : start + EVAL_BATCH]
        leaves = np.repeat((item_at >= 0)[None], len(seen), axis=0)
        for user, items in enumerate(seen):
            leaves[(user, *codes[items].T)] = False
        scores, paths = search(model, [items[-recipe.window :] for items in seen], leaves, codes, recipe, beam)
        found = np.where(np.isfinite(scores), item_at[tuple(paths.transpose(2, 0, 1))], -1)
        lists[start : start + len(seen), : found.shape[1]] = found
    return lists


def search(
    model: Any, prompts: list[IntArray], leaves: NDArray[np.bool_], codes: IntArray, recipe: Recipe, beam: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scores [U, W] and code paths [U, W, L] of the best complete SIDs.

    Args:
        prompts: item rows of each user's history, oldest first.
        leaves: [U, *codebook] which SIDs the user may get.
    """
    from transformers import DynamicCache

    users, levels = len(prompts), len(recipe.codebook)
    first = token_ids(np.zeros((1, levels), np.int32), recipe.codebook)[0]
    live = [torch.from_numpy(leaves.any(axis=tuple(range(depth + 2, levels + 1)))) for depth in range(levels)]
    inputs, mask = left_padded(prompts, token_ids(codes, recipe.codebook))
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(inputs, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
    scores, paths = torch.zeros(users, 1), torch.zeros(users, 1, 0, dtype=torch.int64)
    for depth, size in enumerate(recipe.codebook):
        width = scores.shape[1]
        level = log_softmax(logits.float(), -1)[:, first[depth] : first[depth] + size].view(users, width, size)
        user_index = torch.arange(users)[:, None].expand(users, width)
        allowed = live[depth][(user_index, *paths.unbind(-1))]
        candidates = (scores[:, :, None] + level).masked_fill(~allowed, -math.inf).flatten(1)
        scores, chosen = candidates.topk(min(beam, candidates.shape[1]), dim=1)
        parent, code = chosen // size, chosen % size
        paths = torch.cat([paths.gather(1, parent[..., None].expand(-1, -1, depth)), code[..., None]], -1)
        if depth + 1 < levels:
            rows = (torch.arange(users)[:, None] * width + parent).flatten()
            cache.batch_select_indices(rows)
            mask = torch.cat([mask[rows], torch.ones(len(rows), 1, dtype=torch.int64)], 1)
            logits = model(
                code.flatten()[:, None] + int(first[depth]),
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
            ).logits[:, -1]
    return scores.numpy(), paths.numpy()


def left_padded(prompts: list[IntArray], tokens: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask [U, T]: BOS and the items' tokens, every prompt ending in the last column."""
    rows = [np.concatenate(([BOS], tokens[items].ravel())) for items in prompts]
    width = max(map(len, rows))
    inputs = torch.full((len(rows), width), PAD)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for user, row in enumerate(rows):
        inputs[user, width - len(row) :] = torch.from_numpy(row)
        mask[user, width - len(row) :] = 1
    return inputs, mask


def save_checkpoint(model: Any, recipe: Recipe, out: Path) -> None:
    """A Hugging Face directory in bfloat16: config.json, model.safetensors, tokenizer.json, tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({token: at for at, token in enumerate(SPECIAL_TOKENS)}, unk_token="<unk>"))
    words.add_special_tokens(list(SPECIAL_TOKENS))
    words.add_tokens(
        [
            AddedToken(f"<{name}_{code}>", normalized=False)
            for name, size in zip(LEVEL_NAMES, recipe.codebook, strict=True)
            for code in range(size)
        ]
    )
    words.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>", model_max_length=CONTEXT
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def hit_share(lists: NDArray[Any], target: IntArray, k: int) -> float:
    """Share of users whose target is among their first k."""
    return float((lists[:, :k] == target[:, None]).any(1).mean())


def make_demo(recipe: Recipe, cache: Path, out: Path) -> None:
    """Trains, saves and measures."""
    from transformers import Qwen3ForCausalLM, __version__

    interactions, items = ml100k.fetch(cache)
    movies = ml100k.read_movies(items)
    split = ml100k.leave_one_out(*ml100k.read_sequences(interactions))
    inner = ml100k.without_last(split)
    codes = semantic_ids.residual_kmeans(semantic_ids.item_vectors(inner.history, movies), recipe.codebook, recipe.seed)
    out.mkdir(parents=True, exist_ok=True)
    write_codes(out / "item_codes.csv", movies, codes)

    def rows(part: ml100k.Split) -> tuple[list[IntArray], IntArray]:
        """Item rows in place of item numbers: histories, and what came next."""
        return (
            [np.searchsorted(movies.item_id, past).astype(np.int32) for past in part.history],
            np.searchsorted(movies.item_id, part.target).astype(np.int32),
        )

    tokens = token_ids(codes, recipe.codebook)
    print("phase 1: how many epochs", flush=True)
    past, following = rows(inner)
    _, losses = train(past, tokens, recipe, recipe.max_epochs, following)
    epochs = int(np.argmin(losses)) + 1
    print(f"phase 2: {epochs} epochs on everything but the test target", flush=True)
    past, target = rows(split)
    model, _ = train(past, tokens, recipe, epochs, None)
    save_checkpoint(model, recipe, out / "checkpoint")

    saved = Qwen3ForCausalLM.from_pretrained(out / "checkpoint", dtype=torch.float32)
    lists = recommend(saved, past, codes, recipe, beam=50)  # from_pretrained leaves the model in eval mode
    popular = np.searchsorted(movies.item_id, ml100k.popularity_lists(split, movies.item_id, 50))
    record = {
        "recipe": asdict(recipe),
        "epochs": epochs,
        "validation_loss": losses,
        "test_recall": {
            str(k): {"model": hit_share(lists, target, k), "popularity": hit_share(popular, target, k)}
            for k in (1, 5, 10, 50)
        },
        "parameters": sum(tensor.numel() for tensor in saved.parameters()),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": __version__},
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record["test_recall"], indent=2))


def write_codes(path: Path, movies: ml100k.Movies, codes: IntArray) -> None:
    """The table from item number to codes, as text."""
    lines = ["item_id," + ",".join(LEVEL_NAMES[: codes.shape[1]])]
    lines += [",".join(map(str, (item, *row))) for item, row in zip(movies.item_id, codes.tolist(), strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEMO, help="receives checkpoint/, item_codes.csv and training.json")
    parser.add_argument("--cache", type=Path, default=ROOT / "work" / "movielens" / "download")
    parser.add_argument("--threads", type=int, default=1, help="for training; part of what decides the last bits")
    parser.add_argument("--max-epochs", type=int, default=Recipe.max_epochs)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    make_demo(Recipe(max_epochs=arguments.max_epochs), arguments.cache, arguments.out)


if __name__ == "__main__":
    main()
