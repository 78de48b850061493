"""Names and shapes of Llama models, as transformers has them, and LoRA adapters in PEFT's naming."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, in the order of the module. Norms are in an optimizer group of their own, without decay."""

    name: str
    shape: Shape
    trained: bool = True

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Model:
    """A model's parameters."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def frozen(self) -> list[Parameter]:
        """Those that were not trained."""
        return [parameter for parameter in self.parameters if not parameter.trained]

    @property
    def groups(self) -> list[list[Parameter]]:
        """The optimizer's parameter groups: matrices, then vectors; none is empty."""
        trained = [parameter for parameter in self.parameters if parameter.trained]
        groups = [[p for p in trained if len(p.shape) > 1], [p for p in trained if len(p.shape) == 1]]
        return [group for group in groups if group]


@dataclass(frozen=True, slots=True)
class Llama:
    """The numbers that make a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


PRESETS: Final[dict[str, Llama]] = {
    "tiny": Llama(48, 80, 3, 6, 2, 131),
    "1B": Llama(2048, 5632, 22, 32, 4, 32_000),
    "7B": Llama(4096, 11_008, 32, 32, 32, 32_000),
    "70B": Llama(8192, 28_672, 80, 64, 8, 32_000),
    "405B": Llama(16_384, 53_248, 126, 128, 8, 128_256),
}


def llama(preset: str, *, layers: int | None = None) -> Model:
    """A preset, perhaps with another number of layers."""
    numbers = PRESETS[preset]
    if layers is not None:
        numbers = replace(numbers, layers=layers)
    hidden, kv = numbers.hidden, numbers.hidden // numbers.heads * numbers.kv_heads
    vocabulary = (numbers.vocabulary, hidden)
    parameters = [Parameter("model.embed_tokens.weight", vocabulary)]
    for layer in range(numbers.layers):
        prefix = f"model.layers.{layer}."
        parameters += [
            Parameter(prefix + "self_attn.q_proj.weight", (hidden, hidden)),
            Parameter(prefix + "self_attn.k_proj.weight", (kv, hidden)),
            Parameter(prefix + "self_attn.v_proj.weight", (kv, hidden)),
            Parameter(prefix + "self_attn.o_proj.weight", (hidden, hidden)),
            Parameter(prefix + "mlp.gate_proj.weight", (numbers.intermediate, hidden)),
            Parameter(prefix + "mlp.up_proj.weight", (numbers.intermediate, hidden)),
            Parameter(prefix + "mlp.down_proj.weight", (hidden, numbers.intermediate)),
            Parameter(prefix + "input_layernorm.weight", (hidden,)),
            Parameter(prefix + "post_attention_layernorm.weight", (hidden,)),
        ]
    parameters += [Parameter("model.norm.weight", (hidden,)), Parameter("lm_head.weight", vocabulary)]
    return Model(preset if layers is None else f"{preset}, {layers} layers", tuple(parameters))


def small_tensors(count: int, numel: int) -> Model:
    """`count` vectors and matrices of `numel` elements each, for the cost of a tensor."""
    shapes = [(numel,) if index % 8 == 7 else (numel // 2, 2) for index in range(count)]
    return Model(f"{count} x {numel}", tuple(Parameter(f"p.{i}.weight", shape) for i, shape in enumerate(shapes)))


def with_lora(model: Model, *, rank: int = 16) -> Model:
    """`model` frozen, with trained adapters on the q and v projections."""
    parameters = []
    for parameter in model.parameters:
        module = "base_model.model." + parameter.name.removesuffix(".weight")
        if not module.endswith(("q_proj", "v_proj")):
            parameters.append(Parameter(module + ".weight", parameter.shape, trained=False))
            continue
        out, inner = parameter.shape
        parameters += [
            Parameter(module + ".base_layer.weight", parameter.shape, trained=False),
            Parameter(module + ".lora_A.default.weight", (rank, inner)),
            Parameter(module + ".lora_B.default.weight", (out, rank)),
        ]
    return Model(f"{model.name} + LoRA", tuple(parameters))
