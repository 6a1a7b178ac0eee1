"""Models that groups are chosen in: the shapes of well-known architectures, without their arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Shaped(nn.Module):
    """Has a forward, which nobody calls."""

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("choosing groups runs nothing")


class LlamaAttention(Shaped):
    def __init__(self, width: int, kv_width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)


class LlamaMLP(Shaped):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)


class LlamaDecoderLayer(Shaped):
    def __init__(self, width: int, kv_width: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(width, kv_width)
        self.mlp = LlamaMLP(width, hidden)
        self.input_layernorm = nn.RMSNorm(width)
        self.post_attention_layernorm = nn.RMSNorm(width)


class LlamaModel(Shaped):
    def __init__(self, layers: int, width: int, kv_width: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaDecoderLayer(width, kv_width, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)


class LlamaForCausalLM(Shaped):
    """8 billion parameters by default."""

    def __init__(self, layers: int = 32, width: int = 4096, kv_width: int = 1024, hidden: int = 14336) -> None:
        super().__init__()
        self.model = LlamaModel(layers, width, kv_width, hidden, 128256)
        self.lm_head = nn.Linear(width, 128256, bias=False)


class GPTBlock(Shaped):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class GPT(Shaped):
    """GPT-2, whose head is the embedding."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        h = nn.ModuleList(GPTBlock(width) for _ in range(12))
        parts = {"wte": nn.Embedding(50257, width), "wpe": nn.Embedding(1024, width), "h": h}
        self.transformer = nn.ModuleDict({**parts, "ln_f": nn.LayerNorm(width)})
        self.lm_head = nn.Linear(width, 50257, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight


class T5Stack(Shaped):
    def __init__(self, embedding: nn.Embedding, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.block = nn.ModuleList(layer() for _ in range(6))
        self.final_layer_norm = nn.RMSNorm(512)


class EncoderLayer(Shaped):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(512, 4 * 512)
        self.feed_forward = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))


class DecoderLayer(EncoderLayer):
    def __init__(self) -> None:
        super().__init__()
        self.cross_attention = nn.Linear(512, 4 * 512)


class EncoderDecoder(Shaped):
    """One embedding module, registered in three places, whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(32128, 512)
        self.encoder = T5Stack(self.shared, EncoderLayer)
        self.decoder = T5Stack(self.shared, DecoderLayer)
        self.lm_head = nn.Linear(512, 32128, bias=False)
        self.lm_head.weight = self.shared.weight


class Bottleneck(Shaped):
    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        if channels != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width))


class ResNet(Shaped):
    """ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, bias=False), nn.BatchNorm2d(64)
        channels = 64
        for number, count in enumerate((3, 4, 6, 3), start=1):
            width = 32 * 2**number
            blocks = [Bottleneck(channels if each == 0 else 4 * width, width) for each in range(count)]
            channels = 4 * width
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.fc = nn.Linear(2048, 1000)


class Torchs(Shaped):
    """Modules of torch that compute with the parameters of their submodules, around and beside attention."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.attention = nn.MultiheadAttention(1024, 8)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(1024, 1024))


class Swin(Shaped):
    """Stages of blocks: the same class at two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 128, 4, 4)
        stages = []
        for number, depth in enumerate((2, 2, 18, 2)):
            width = 128 * 2**number
            stages.append(SwinStage(width, depth, last=number == 3))
        self.layers = nn.ModuleList(stages)
        self.head = nn.Linear(1024, 1000)


class SwinStage(Shaped):
    def __init__(self, width: int, depth: int, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GPTBlock(width) for _ in range(depth))
        self.downsample = None if last else nn.Linear(4 * width, 2 * width, bias=False)


class Recommender(Shaped):
    """Little but one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(100_000_000, 64)
        self.users = nn.Embedding(1_000_000, 64)
        self.tower = nn.Sequential(
            nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
        )


class Unequal(Shaped):
    """No two children alike, inside a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UnequalNet()


class UnequalNet(Shaped):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1024, 64))
        self.images = nn.Conv2d(3, 1024, 16)
        self.mixer = nn.Linear(1024, 2048)
        self.lstm = nn.LSTM(2048, 2048)
        self.norm = nn.LayerNorm(2048)
        self.small = nn.Linear(2048, 16)
        self.wide = nn.Sequential(nn.Linear(2048, 16384), nn.GELU(), nn.Bilinear(64, 64, 256), nn.Conv1d(16384, 512, 3))
