"""The three networks whose workloads are counted, in plain torch.

Tensors have the names, and are registered in the order, of torchvision's ``resnet50`` and
``vgg16`` and of Hugging Face's ``BertModel``, so that the workloads match those models.
"""

import torch
import torch.nn.functional as F
from torch import nn


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
