import torch

from vllm_teach.kvcache.storage import KVStorage


def test_write_scatters_and_view_shares_memory():
    storage = KVStorage(num_layers=2, num_slots=10, kv_heads=3, head_dim=4, dtype=torch.float32, device="cpu")
    storage.keys.fill_(torch.nan)
    storage.values.fill_(torch.nan)
    k, v = torch.randn(4, 3, 4), torch.randn(4, 3, 4)
    storage.write(1, torch.tensor([7, 2, 3, 8]), k, v)
    keys, values = storage.view(1, 2, 2)
    assert torch.equal(keys, k[[1, 2]])
    assert torch.equal(values, v[[1, 2]])
    assert torch.equal(storage.view(1, 7, 2)[0], k[[0, 3]])
    assert storage.keys[0].isnan().all()
    assert int(storage.keys[1].isnan().any(-1).any(-1).sum()) == 6
    storage.write(1, torch.tensor([2]), k[:1], v[:1])
    assert torch.equal(keys[0], k[0])  # the view saw it: no copy


def test_bytes_are_what_the_bookkeeping_says():
    from transformers import LlamaConfig

    from vllm_teach.models.config import ModelConfig

    config = ModelConfig.from_hf(LlamaConfig(num_hidden_layers=2, num_key_value_heads=4).to_dict())
    for dtype in (torch.float32, torch.bfloat16):
        storage = KVStorage(2, 5, config.num_kv_heads, config.head_dim, dtype, "cpu")
        assert storage.keys.nbytes + storage.values.nbytes == 5 * config.kv_bytes_per_token(dtype.itemsize)
