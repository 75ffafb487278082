"""What an architecture writes with: a tape, the model's weights, and the two blocks that all families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forerun import ops
from forerun.models.config import ModelConfig, RopeConfig, rope_table
from forerun.models.packed import PackedTensor
from forerun.models.source import ModelSource
from forerun.ops.tape import Buffer, Into, RopeTable, Tape, Vector, Weight


class Recorder:
    """A tape together with one model's weights and the working buffers of its layers.

    Rows of all buffers are the step's tokens, after `only_outputs` those whose next token is wanted. `positions` bounds
    the rotary tables.
    """

    def __init__(
        self,
        tape: Tape,
        config: ModelConfig,
        source: ModelSource,
        packed: Mapping[str, PackedTensor],
        positions: int,
    ) -> None:
        self.tape = tape
        self.config = config
        self._source = source
        self._packed = packed
        self._positions = positions
        self._ropes: dict[RopeConfig, RopeTable] = {}
        c = config
        self.x = tape.buffer(c.hidden_size)  # the residual stream
        self.h = tape.buffer(c.hidden_size)  # a normed copy
        self.q = tape.buffer(c.query_size)
        self.k = tape.buffer(c.kv_size)
        self.v = tape.buffer(c.kv_size)
        self.attended = tape.buffer(c.query_size)
        self.gate = tape.buffer(c.ffn_size)

    def weight(self, name: str) -> Weight:
        """A packed matrix by GGUF name."""
        p = self._packed[name]
        return self.tape.weight(p.type, p.n, p.k, p.data)

    def vector(self, name: str) -> Vector:
        """Norm weights or a bias by GGUF name, as float32."""
        return self.tape.vector(ops.dequantize(self._source.tensor(name)))

    def rope(self, layer: int) -> RopeTable:
        """The cos/sin table that a layer rotates with; layers share tables."""
        rope = self.config.rope_of(layer)
        if rope not in self._ropes:
            table = rope_table(rope, self._positions)
            self._ropes[rope] = self.tape.rope_table(table.cos, table.sin, interleaved=rope.style == "interleaved")
        return self._ropes[rope]

    def embed(self) -> Buffer:
        """x = the tokens' embeddings."""
        return self.tape.embed(self._source.tensor("token_embd.weight"), self.x, self.config.embedding_scale)

    def norm(self, x: Buffer, name: str, out: Buffer) -> Buffer:
        """out = RMS norm of x."""
        return self.tape.rms_norm(x, self.vector(name), self.config.rms_eps, out)

    def attention(self, layer: int, x: Buffer) -> Buffer:
        """Self-attention over the cached keys, up to but without the output projection."""
        c, t, at = self.config, self.tape, f"blk.{layer}.attn_"
        targets = (("q", self.q), ("k", self.k), ("v", self.v))
        t.linear(
            x,
            [
                Into(
                    self.weight(f"{at}{n}.weight"),
                    out,
                    self.vector(f"{at}{n}.bias") if c.attention_bias else None,
                )
                for n, out in targets
            ],
        )
        norms = [self.vector(f"{at}{n}_norm.weight") for n in ("q", "k")] if c.qk_norm else [None, None]
        t.rope_store(
            self.q,
            self.k,
            self.v,
            layer=layer,
            n_heads=c.n_heads,
            n_kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            rope=self.rope(layer),
            q_norm=norms[0],
            k_norm=norms[1],
            eps=c.rms_eps,
        )
        return t.attention(
            self.q,
            self.attended,
            layer=layer,
            n_heads=c.n_heads,
            n_kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            scale=c.attention_scale,
            window=c.window_of(layer) or 0,
        )

    def only_outputs(self, *buffers: Buffer) -> list[Buffer]:
        """Their rows for the tokens whose next one is wanted; working buffers have only those from now on.

        For the last layer, behind its attention: nothing reads the other tokens' rows any more, and in a prompt these
        are nearly all.
        """
        self.h = self.tape.buffer(self.h.width, outputs=True)
        self.gate = self.tape.buffer(self.gate.width, outputs=True)
        return [self.tape.gather(x, self.tape.buffer(x.width, outputs=True)) for x in buffers]

    def gated(self, layer: int, x: Buffer, *, gelu: bool = False) -> Buffer:
        """act(x W_gate) * (x W_up), up to but without the down projection."""
        at = f"blk.{layer}.ffn_"
        gate, up = self.weight(f"{at}gate.weight"), self.weight(f"{at}up.weight")
        return self.tape.gated(x, gate, up, self.gate, gelu=gelu)

    def project(self, x: Buffer, name: str, out: Buffer, *, accumulate: bool = False) -> Buffer:
        """out (+)= x W."""
        self.tape.linear(x, [Into(self.weight(name), out, accumulate=accumulate)])
        return out

    def pre_norm_layers(self) -> Buffer:
        """The stack that Llama and Qwen share: norm, attention, add; norm, gated MLP, add."""
        x = self.embed()
        for layer in range(self.config.n_layers):
            at = f"blk.{layer}."
            a = self.attention(layer, self.norm(x, f"{at}attn_norm.weight", self.h))
            if layer == self.config.n_layers - 1:
                x, a = self.only_outputs(x, a)
            self.project(a, f"{at}attn_output.weight", x, accumulate=True)
            m = self.gated(layer, self.norm(x, f"{at}ffn_norm.weight", self.h))
            self.project(m, f"{at}ffn_down.weight", x, accumulate=True)
        return x


def matrices(config: ModelConfig) -> Sequence[str]:
    """Names of the matrices that a forward pass multiplies with, in the order in which it reads them."""
    names = [
        f"blk.{layer}.{part}.weight"
        for layer in range(config.n_layers)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    ]
    return [*names, "token_embd.weight" if config.tied_embeddings else "output.weight"]
