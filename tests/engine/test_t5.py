"""T5 and TIGER: the forward pass, the cached steps and the whole search against a slow T5 in float64."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from brute_force import any_search, equals_brute_force
from hypothesis import settings
from t5_tiny import GATED_T5, TINY_T5, TinyT5, load_tiger, renamed
from tiny import (
    CODES,
    DEVICE,
    TOKENS,
    TinyCatalog,
    lists,
    random_prompts,
    same_ranking,
    save_weights,
    token_table,
)

from xgr_engine.errors import XgrError
from xgr_engine.models.encoder_decoder import EncoderDecoder
from xgr_engine.models.loading import load_model
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.models.rows import Rows
from xgr_engine.models.spec import EncoderDecoderSpec
from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender
from xgr_engine.tokens.table import SidTokenTable

NOTHING = np.empty(0, np.int32)


@pytest.fixture(scope="module", params=["relu, tied, scaled", "gated, untied, not scaled"])
def t5(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyT5:
    spec = TINY_T5 if request.param.startswith("relu") else GATED_T5
    return TinyT5(tmp_path_factory.mktemp("t5"), spec)


@torch.inference_mode()
def cached_logits(model: EncoderDecoder, head: torch.Tensor, prompts: list, answers: list[list[int]]) -> torch.Tensor:
    """[U, A + 1, V] logits after each prompt's start token and after each of A answer tokens, through the cache."""
    users, length = len(prompts), len(answers[0])
    cache = model.new_cache(sum(map(len, prompts)), users, length)
    cache.generated_k.fill_(torch.nan)
    cache.generated_v.fill_(torch.nan)
    hidden = [model.prefill(PackedPrompts.of(prompts, model.device, share=False), cache)]
    for at in range(length):
        first = torch.arange(users, device=model.device) * cache.slots
        rows = Rows(
            tokens=torch.tensor([answer[at] for answer in answers], device=model.device),
            position=torch.full((users,), 10_000, device=model.device),  # a T5 has no use for it
            slots=first + at,
            ancestors=torch.arange(at + 1, dtype=torch.int32, device=model.device).expand(users, 1, -1).contiguous(),
            cells=None,
        )
        hidden.append(model.decode(rows, cache))
    return torch.stack(hidden, 1) @ head.T


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 3e-5)])
@pytest.mark.parametrize(("gated", "tied", "scaled"), list(itertools.product([False, True], repeat=3)))
def test_every_cached_step_equals_a_whole_pass(
    tmp_path: Path, gated: bool, tied: bool, scaled: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Ragged prompts of 1 to 41 tokens, nine answer tokens: distances on both sides of every bucket's edge.

    Logits are of the order of 10. In float64 nothing but the same numbers is left; float32 rounds them to 1e-6, some
    tens of times.
    """
    if dtype == torch.float64 and DEVICE == "cuda":
        pytest.skip("the Triton kernels know no float64")
    spec = replace(TINY_T5, gated=gated, tied=tied, scaled_output=scaled)
    world = TinyT5(tmp_path, spec, seed=3, dtype=dtype)
    prompts = random_prompts(1, [5, 1, 41, 17, 5, 1])
    answers = [prompt.tolist() for prompt in random_prompts(2, [9] * 6)]
    got = cached_logits(world.model, world.head, prompts, answers)
    for user, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        for length in range(10):
            expected = world.naive.logits(tuple(prompt.tolist()), tuple(answer[:length]))
            torch.testing.assert_close(got[user, length].double().cpu(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_bias_off_by_one_bucket_is_seen(tmp_path: Path, stack: str) -> None:
    """The comparison above fails by far when either stack's table of biases is shifted by one distance."""
    world = TinyT5(tmp_path)
    name = f"_{'own' if stack == 'decoder' else 'encoder'}_bias"
    setattr(world.model, name, getattr(world.model, name).roll(1, 0))
    (prompt,) = random_prompts(1, [7])
    got = cached_logits(world.model, world.head, [prompt], [[1, 2, 3]])[0, 3].double().cpu()
    assert (got - world.naive.logits(tuple(prompt.tolist()), (1, 2, 3))).abs().max() > 1e-2


@settings(max_examples=60, deadline=None)
@any_search
def test_equals_brute_force(t5: TinyT5, **search) -> None:
    equals_brute_force(t5, **search)


def test_scores_of_a_full_tree_of_depth_4(t5: TinyT5) -> None:
    """W as large as the tree: each score is the path's own log-probability, whichever beams stood beside it."""
    sids = list(itertools.product(range(3), repeat=4))
    catalog = TinyCatalog.of(sids)
    (prompt,) = random_prompts(3, [7])
    result = t5.recommender(catalog, SearchOptions(beam=81, top_k=81)).run([prompt], [NOTHING])
    found = lists(catalog, result)[0]
    assert len(found) == 81
    for item, score in found:
        tokens = tuple(TOKENS[level][code] for level, code in enumerate(sids[item]))
        steps = (t5.naive.logits(tuple(prompt.tolist()), tokens[:at]).log_softmax(0)[tokens[at]] for at in range(4))
        assert score == pytest.approx(float(sum(steps)), abs=2e-5)


def test_a_list_does_not_depend_on_the_batch(t5: TinyT5) -> None:
    """Ragged prompts, one-token prompts, some that begin alike, in batches of 1, 7 and 64, in any order."""
    generator = np.random.default_rng(0)
    catalog = TinyCatalog.of([tuple(generator.integers(0, CODES, 3).tolist()) for _ in range(150)])
    start = generator.integers(0, 30, 12).astype(np.int32)
    prompts = random_prompts(1, generator.integers(1, 48, 40).tolist()) + random_prompts(2, [1] * 8)
    prompts += [np.concatenate([start, tail]) for tail in random_prompts(3, generator.integers(1, 30, 16).tolist())]
    excluded = [generator.integers(0, 150, 10).astype(np.int32) for _ in prompts]
    recommender = t5.recommender(catalog, SearchOptions(beam=20, top_k=15))
    order = generator.permutation(64)

    def answers(size: int, users: np.ndarray) -> dict[int, list]:
        found = {}
        for at in range(0, 64, size):
            batch = users[at : at + size]
            result = recommender.run([prompts[user] for user in batch], [excluded[user] for user in batch])
            found |= dict(zip(batch.tolist(), lists(catalog, result), strict=True))
        return found

    alone = answers(1, np.arange(64))
    for other in (answers(7, np.arange(64)), answers(64, np.arange(64)), answers(7, order)):
        for user, answer in other.items():
            same_ranking(answer, [(item, (), score) for item, score in alone[user]], tolerance=1e-5)


def test_a_pack_with_a_shared_beginning_is_refused(t5: TinyT5) -> None:
    """What an encoder makes of a beginning depends on what follows it."""
    pack = PackedPrompts.of(random_prompts(3, [7]) * 2, t5.model.device)
    assert pack.prefix == 6
    with pytest.raises(ValueError, match="share=False"):
        t5.model.prefill(pack, t5.model.new_cache(pack.cache_tokens, 2, 1))


def test_bits_do_not_change_from_run_to_run(t5: TinyT5) -> None:
    catalog = TinyCatalog.of([(a, b) for a in range(6) for b in range(6)])
    prompts = random_prompts(9, [3, 17, 40, 1, 8])
    recommender = t5.recommender(catalog, SearchOptions(beam=10, top_k=10))
    first, second = (recommender.run(prompts, [NOTHING] * 5) for _ in range(2))
    assert (first.scores == second.scores).all() and (first.item_rows == second.item_rows).all()


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_model_of_nans_is_an_error(t5: TinyT5, prompts: int) -> None:
    old = t5.model
    broken = EncoderDecoder(
        old.spec,
        old.embed * float("nan"),
        old.encoder,
        old.decoder,
        old.ops,
    )
    catalog = TinyCatalog.of([(0, 1), (2, 2)])
    recommender = replace_model(t5, broken).recommender(catalog, SearchOptions(beam=2, top_k=2))
    with pytest.raises(XgrError, match="not a number"):
        recommender.run(random_prompts(0, [4] * prompts), [NOTHING] * prompts)


def replace_model(world: TinyT5, model: EncoderDecoder) -> TinyT5:
    changed = object.__new__(TinyT5)
    changed.__dict__ |= vars(world) | {"model": model}
    return changed


def transformers_t5(spec: EncoderDecoderSpec):
    """A random model of transformers' own with the sizes of ``spec``."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=spec.vocab_size,
        d_model=spec.hidden_size,
        d_kv=spec.head_dim,
        d_ff=spec.intermediate_size,
        num_layers=spec.num_encoder_layers,
        num_decoder_layers=spec.num_layers,
        num_heads=spec.num_heads,
        relative_attention_num_buckets=spec.num_buckets,
        relative_attention_max_distance=spec.max_distance,
        feed_forward_proj="gated-gelu" if spec.gated else "relu",
        layer_norm_epsilon=spec.rms_eps,
        decoder_start_token_id=spec.start_token,
        pad_token_id=0,
        eos_token_id=1,
        initializer_factor=1.5,  # the usual 1 makes all tokens nearly equal
    )
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.skipif(DEVICE == "cuda", reason="transformers runs on the CPU here")
@pytest.mark.parametrize("gated", [False, True])
def test_equals_generate_of_transformers(tmp_path: Path, gated: bool) -> None:
    """Constrained beam search of transformers with a trie callback: the same SIDs and scores, to depth 4."""
    # its cache takes the decoder to have as many layers as the encoder
    spec = replace(TINY_T5, gated=gated, tied=True, scaled_output=True, num_layers=2)
    theirs = transformers_t5(spec)
    path = save_weights(renamed(theirs.state_dict(), tied=True), tmp_path / "hf.safetensors")
    model, head = load_model(spec, path)
    rng = np.random.default_rng(5)
    sids = sorted({tuple(rng.integers(0, CODES, 4).tolist()) for _ in range(200)})
    catalog = TinyCatalog.of(sids)
    paths = [[TOKENS[level][code] for level, code in enumerate(sid)] for sid in sids]
    children: dict[tuple[int, ...], list[int]] = {}
    for tokens in paths:
        for at in range(4):
            children.setdefault(tuple(tokens[:at]), []).append(tokens[at])

    def allowed(_: int, written: torch.Tensor) -> list[int]:
        return children.get(tuple(written.tolist()[1:]), [1])

    options = SearchOptions(beam=12, top_k=12)
    recommender = Recommender(model, head, catalog.trie, token_table(), options)
    prompts = random_prompts(4, [9, 1, 23])
    got = lists(catalog, recommender.run(prompts, [NOTHING] * 3))
    for prompt, mine in zip(prompts, got, strict=True):
        with torch.inference_mode():
            found = theirs.generate(
                torch.tensor(prompt[None].astype(np.int64)),
                num_beams=12,
                num_return_sequences=12,
                max_new_tokens=4,
                min_new_tokens=4,
                prefix_allowed_tokens_fn=allowed,
                renormalize_logits=False,
                length_penalty=0.0,
                do_sample=False,
            )
            # generate's own scores are cut short by its masks: the sum of the same model's log-probabilities instead
            inputs = torch.tensor(prompt[None].astype(np.int64)).expand(len(found), -1)
            logits = theirs(input_ids=inputs, decoder_input_ids=found[:, :-1]).logits.log_softmax(-1)
        scores = logits.gather(2, found[:, 1:, None]).squeeze(2).sum(1).tolist()
        expected = sorted(
            zip((paths.index(row) for row in found[:, 1:].tolist()), scores, strict=True), key=lambda pair: -pair[1]
        )
        same_ranking(mine, [(item, (), score) for item, score in expected])


@pytest.mark.shared_data
def test_golden_lists_of_tiger(shared_data: Path, tmp_path: Path) -> None:
    """256 users of the fixture, beam 50: the 50 items of transformers, float32 scores within 5e-5."""
    folder = shared_data / "industrial"
    _, model, head = load_tiger(folder / "t5_tiger", tmp_path)
    sids = json.loads((folder / "t5_tiger" / "semantic_ids.json").read_text())
    names = sorted(sids, key=int)
    catalog = TinyCatalog.of([tuple(sids[name]) for name in names])
    codes = np.array([sids[name] for name in names])
    sizes = [np.arange(count, dtype=np.int32) for count in codes.max(0) + 1]
    offsets = (2, 258, 514, 770)
    table = SidTokenTable.from_levels(sizes, [own + offset for own, offset in zip(sizes, offsets, strict=True)])
    recommender = Recommender(model, head, catalog.trie, table, SearchOptions(beam=50, top_k=50))
    users = json.loads((folder / "golden_t5_tiger.json").read_text())["users"]
    assert len(users) == 256
    worst = 0.0
    for at in range(0, 256, 64):
        batch = users[at : at + 64]
        result = recommender.run([np.array(user["encoder_ids"], np.int32) for user in batch], [NOTHING] * 64)
        for user, found in zip(batch, lists(catalog, result), strict=True):
            got = {int(names[item]): score for item, score in found}
            want = dict(user["items"])
            assert set(got) == set(want), user["user_id"]
            assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
            worst = max(worst, *(abs(got[item] - score) for item, score in want.items()))
    assert worst < 5e-5
