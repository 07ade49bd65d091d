"""``generate`` gives the tokens of one device on every rank, with the cache cut over the ranks."""

import pytest
import torch

import hdtensor as hd
from tests.models.hf import batch, build, strategy
from tests.support.world import run_world


PAIR = strategy(([0, 1], 1))
UNLIKE = strategy(([0, 1], 5), ([2], 3))
OPTIONS = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}


def _prompt():
    ids = batch(0, size=4, length=6)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # padded on the left
    return {"input_ids": ids, "attention_mask": mask}


def _generate(rank, families, plan, options):
    for family in families:
        reference = build(family, use_cache=True, initializer_range=0.3).eval()
        model = build(family, use_cache=True, initializer_range=0.3).eval()
        hd.parallelize(model, plan)
        torch.manual_seed(3)
        expected = reference.generate(**_prompt(), **OPTIONS, **options)
        torch.manual_seed(3)
        tokens = model.generate(**_prompt(), **OPTIONS, **options)
        assert type(tokens) is torch.Tensor
        assert torch.equal(tokens, expected), f"{family}: {tokens} instead of {expected}"
        logits = model(**hd.distribute_batch(model, _prompt())).logits
        assert isinstance(logits, hd.HDTensor), "outside of generate results stay distributed"


@pytest.mark.dist(4)
@pytest.mark.parametrize("plan", [PAIR, UNLIKE], ids=["TP2", "TP2_TP1"])
def test_greedy_tokens_are_those_of_one_device(plan):
    run_world(_generate, 4, ("llama", "gpt2", "mixtral"), plan, {"do_sample": False})


@pytest.mark.dist(4)
def test_drawn_tokens_are_those_of_one_device():
    options = {"do_sample": True, "top_k": 8, "temperature": 1.3}
    run_world(_generate, 4, ("llama", "deepseek_v3"), PAIR, options)


def _cache(rank):
    model = hd.parallelize(build("llama", use_cache=True).eval(), PAIR)
    out = model.generate(**_prompt(), **OPTIONS, return_dict_in_generate=True)
    cache = out.get("past_key_values", out.get("cache"))
    keys = cache.layers[0].keys
    return None if not keys.is_local else (tuple(keys.shape), tuple(keys.to_local().shape))


@pytest.mark.dist(4)
def test_the_cache_holds_each_ranks_heads():
    assert run_world(_cache, 4) == [((4, 2, 10, 8), (4, 1, 10, 8))] * 2 + [None] * 2


def _unlike(rank, draws):
    model = hd.parallelize(build("llama", use_cache=True).eval(), PAIR)
    prompt = _prompt()
    torch.manual_seed(rank if draws else 0)
    if not draws:
        prompt["input_ids"][0, 0] = rank
    try:
        model.generate(**prompt, **OPTIONS, do_sample=draws)
    except hd.HDTensorError as error:
        return type(error).__name__, "Every rank of the world" in str(error)
    return None


@pytest.mark.dist(4)
@pytest.mark.parametrize("draws", [False, True], ids=["prompts", "generators"])
def test_ranks_that_differ_are_told_everywhere(draws):
    assert run_world(_unlike, 4, draws) == [("DisagreementError", True)] * 4
