"""The built-in workloads: what a step of known networks computes, tensor by tensor.

    python -m benchmarks.workloads resnet50 [--output FILE]

Four are counted: torch counts the FLOPs of a network in plain torch, and a rate is assumed. Tensors
have the names, and are registered in the order, of torchvision's ``resnet50`` and ``vgg16`` and of
Hugging Face's ``BertModel``, so that the workloads match those models.

googlenet-k80 was measured by the authors of MG-WFBP (Shi et al., INFOCOM 2019): ``logdata/tmpcomm.log`` of
github.com/hclhkbu/B-Caffe. Their Caffe timed the backward pass of each layer with parameters (weight
and bias together, auxiliary heads included): what ReLU, pooling and the other layers took is missing.
They did not log the forward pass; their own simulation takes it as half the backward pass, and so
does this one.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from paceline.cluster.workload import Workload

PACKAGED = Path(__file__).parents[1] / "src" / "paceline" / "cluster" / "workloads"
"""Where paceline finds a built-in workload by its name."""
ASSUMED_RATE = 1e13
"""FLOP/s that a worker sustains: of the order of one accelerator of the years of these networks in single
precision. Another rate scales all of a workload's seconds."""
GPT_RATE = 6.456e12
"""FLOP/s with which a forward pass of 32 sequences takes 30 ms: a small GPU's, or a large processor's."""

# ---- networks ----


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut.

    The stride is in the 3x3 convolution, as in torchvision; the paper has it in the first
    1x1, which takes fewer operations.
    """

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet50(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition", 2015, table 1."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = self._stage(64, 64, blocks=3, stride=1)
        self.layer2 = self._stage(256, 128, blocks=4, stride=2)
        self.layer3 = self._stage(512, 256, blocks=6, stride=2)
        self.layer4 = self._stage(1024, 512, blocks=3, stride=2)
        self.fc = nn.Linear(2048, 1000)

    @staticmethod
    def _stage(inputs, width, blocks, stride):
        first = Bottleneck(inputs, width, stride)
        rest = [Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)]
        return nn.Sequential(first, *rest)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class VGG16(nn.Module):
    """Simonyan and Zisserman, "Very Deep Convolutional Networks", 2014, column D."""

    def __init__(self):
        super().__init__()
        layers, inputs = [], 3
        for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(convolutions):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 1000),
        )

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class BertLayer(nn.Module):
    """Self-attention and a feed-forward network, each with a shortcut and LayerNorm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        attend = nn.ModuleDict(
            {name: nn.Linear(width, width) for name in ("query", "key", "value")}
        )
        self.attention = nn.ModuleDict(
            {"self": attend, "output": _output(width, width)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, 4 * width)})
        self.output = _output(4 * width, width)

    def forward(self, x):
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in self.attention["self"].values()
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        mixed = mixed.transpose(1, 2).flatten(2)
        output = self.attention["output"]
        x = output["LayerNorm"](x + output["dense"](mixed))
        wide = F.gelu(self.intermediate["dense"](x))
        return self.output["LayerNorm"](x + self.output["dense"](wide))


def _output(inputs, width):
    return nn.ModuleDict(
        {"dense": nn.Linear(inputs, width), "LayerNorm": nn.LayerNorm(width)}
    )


class BertBase(nn.Module):
    """Devlin et al., "BERT", 2018, BERT-base uncased: encoder and pooler, no other head.

    Takes token ids of shape (sequences, tokens); dropout is left out.
    """

    def __init__(self, width=768, layers=12, heads=12):
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(30522, width),
                "position_embeddings": nn.Embedding(512, width),
                "token_type_embeddings": nn.Embedding(2, width),
                "LayerNorm": nn.LayerNorm(width),
            }
        )
        blocks = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.encoder = nn.ModuleDict({"layer": blocks})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(width, width)})

    def forward(self, tokens):
        x = self.embeddings["word_embeddings"](tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = x + self.embeddings["position_embeddings"](positions)
        x = x + self.embeddings["token_type_embeddings"](torch.zeros_like(tokens))
        x = self.embeddings["LayerNorm"](x)
        for block in self.encoder["layer"]:
            x = block(x)
        return x, torch.tanh(self.pooler["dense"](x[:, 0]))


class Gpt(nn.Module):
    """A decoder after Radford et al., "GPT-2", 2019, in the size in which nanoGPT trains on characters:
    10.7 million parameters, of which the embedding is the output layer, too; no biases.

    Takes token ids of shape (sequences, tokens); dropout is left out.
    """

    def __init__(self, width=384, layers=6, heads=6, tokens=65, most=256):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(tokens, width), nn.Embedding(most, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class GptBlock(nn.Module):
    """Attention over what came before, then two linear layers."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        sequences, tokens, width = x.shape
        parts = self.qkv(self.ln1(x)).split(width, dim=2)
        shape = sequences, tokens, self.heads, width // self.heads
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


# ---- workloads ----

# Parameters:microseconds of the backward pass, as gradients become ready.
TRACE = """
1025024:456.416 106624:2528.67 153728:1257.98 40000:1658.56 663936:2372 159936:3531.36
319872:2842.02 106624:2573.66 102528:1047.2 26688:1202.37 461120:2031.62 133312:3201.18
213248:3971.46 67712:3334.08 102528:2574.21 16960:1812.29 461120:5077.73 84672:4419.62
135424:5857.86 1025024:466.88 2098176:707.392 67712:1753.7 32832:2302.34 51264:1587.68
16448:2034.18 373568:4847.01 73920:3810.69 57472:2701.15 32832:2492.86 38464:1437.95
12352:1797.18 295168:3398.88 65664:3129.18 65664:3025.79 32832:2188.29 38464:1407.97
12352:1722.78 226048:3054.11 57472:3073.66 82112:4005.89 1025024:469.504 2098176:707.904
65664:1471.39 30784:2120.06 19264:858.88 7744:2621.82 179968:2939.07 46208:2620.58
92352:4318.98 16448:3792.7 76928:3027.74 8256:2559.49 221376:7381.02 32896:4250.3
32896:4281.7 6208:1952.67 12864:1076.7 3136:1898.88 110720:6027.2 18560:2918.11
12352:2618.5 110784:20400 4160:3778.78 9472:14744.1
"""
BYTES_PER_PARAMETER = 4
FORWARD_PER_BACKWARD = 0.5


def _counted(network, inputs, what, rate=ASSUMED_RATE):
    with torch.device("meta"):
        model, batch = network(), inputs()
    return Workload.from_module(
        model,
        batch,
        rate,
        source=f"{what}: FLOPs counted by torch, not measured, at an assumed {rate:g} FLOP/s",
    )


def _images():
    return torch.empty(32, 3, 224, 224)


def _tokens(length):
    return torch.empty(32, length, dtype=torch.long)


def resnet50():
    """ResNet-50."""
    return _counted(ResNet50, _images, "ResNet-50, 32 images of 224 x 224")


def vgg16():
    """VGG-16."""
    return _counted(VGG16, _images, "VGG-16, 32 images of 224 x 224")


def bert_base():
    """BERT-base: encoder and pooler."""
    what = "BERT-base uncased, encoder and pooler, 32 sequences of 128 tokens"
    return _counted(BertBase, lambda: _tokens(128), what)


def gpt_10m():
    """A GPT of 10.7 million parameters, 30 + 60 ms a step."""
    what = "GPT, 6 layers of width 384, 32 sequences of 256 tokens"
    return _counted(Gpt, lambda: _tokens(256), what, GPT_RATE)


def googlenet_k80():
    """GoogLeNet on one K80, as the authors of MG-WFBP measured it."""
    ready = [pair.split(":") for pair in TRACE.split()]
    from_the_input = ready[::-1]
    seconds = [float(microseconds) / 1e6 for _, microseconds in from_the_input]
    return Workload(
        names=tuple(f"layer{i}" for i in range(len(ready))),
        sizes=tuple(BYTES_PER_PARAMETER * int(n) for n, _ in from_the_input),
        forward=tuple(FORWARD_PER_BACKWARD * s for s in seconds),
        backward=tuple(seconds),
        batch=64.0,
        source="GoogLeNet on one K80, batch 64: backward times of B-Caffe's "
        "logdata/tmpcomm.log (Shi et al., 2019); forward assumed half of them, tensor by "
        "tensor. Shapes are not known: to compressors a layer is a matrix as square as can be",
    )


WORKLOADS = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "bert-base": bert_base,
    "gpt-10m": gpt_10m,
    "googlenet-k80": googlenet_k80,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    output = given.output or PACKAGED / f"{given.name}.json"
    workload = WORKLOADS[given.name]()
    workload.save(output)
    print(
        f"{output}: {len(workload.names)} tensors, {sum(workload.sizes)} bytes, "
        f"forward {workload.forward_seconds:.6f} s, "
        f"backward {workload.backward_seconds:.6f} s"
    )


if __name__ == "__main__":
    main()
