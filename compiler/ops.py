"""The op table: for every op kind its attributes, shape rule, numpy meaning and ONNX body.

Adding an op is adding a row. Nothing else in the compiler switches on op kinds except lowering's own table.

Notation: x[T,H] is a value with dims T and H; `?` marks an optional input. Optional inputs are listed by presence flags
in the attributes (`has_bias`), since inputs are positional. Dtypes follow the first input unless said otherwise.

Tensor ops (as captured)
  embedding   (table[V,H], ids[T]) -> [T,H]                       rows of a table; also `gather` of any constant table
  linear      (x[..,K], w[N,K], b[N]?, e1, e2 ..) -> [..,N]       attrs has_bias, epilogue: "" or an expression in which
                                                                  in0 is x @ w.T + b and in1.. are the extra inputs e1..
                                                                  (each [..,N] or [N]); passes fill it
  norm        (x[..,D], w[D]?, b[D]?) -> [..,D]                   attrs kind "rms"|"layer"|"l2", eps, offset (added to w),
                                                                  has_weight, has_bias; computed in float32. w may be
                                                                  [Hn,D] for x[..,Hn,D]
  rope        (x[T,Hn,D], cos[T,Dr/2], sin[T,Dr/2]) -> [T,Hn,D]   attrs style "half"|"pair"; the first Dr columns rotate,
                                                                  the others pass
  attention   (q[T,Hq,D], k[T,Hk,D], v[T,Hk,Dv], sinks[Hq]?) -> [T,Hq,Dv]
                                                                  attrs layer, scale, window (0 none: key j is seen from i
                                                                  if i-j < window), softcap (0 none), causal, has_sinks.
                                                                  Sequences are packed: `positions` restarts at 0
  activation  (x) -> x                                            attrs kind: silu gelu gelu_tanh relu relu2 sigmoid
                                                                  quick_gelu tanh softplus exp sqrt rsqrt neg abs ...
  add sub mul div pow maximum minimum (a, b?) -> broadcast        attrs scalar (used when b is absent), reverse (b op a)
  compare     (a, b?) -> bool                                     attrs op "lt"|"le"|"gt"|"ge"|"eq"|"ne", scalar
  where       (c, a, b) -> broadcast
  clamp       (x) -> x                                            attrs low, high
  softmax     (x) -> x                                            attrs axis
  reduce      (x) -> ..                                           attrs op "sum"|"mean"|"max", axis, keepdims
  bmm         (a[..,M,K], b[..,K,N]) -> [..,M,N]
  reshape     (x) -> shape                                        attrs shape: ints, -1 for the symbolic dimension
  transpose   (x) -> permuted                                     attrs perm
  slice       (x) -> ..                                           attrs axis, start, stop (step 1)
  concat      (a, b, ..) -> ..                                    attrs axis
  cast        (x) -> x                                            attrs dtype
  take_rows   (x[T,H], rows[R]) -> [R,H]                          the rows that need logits

Ops made by passes
  add_norm    (x[T,H], residual[T,H], w?, b?) -> (sum[T,H], norm(sum)[T,H])       attrs of norm
  act_mul     (gate_up[T,2F]) -> [T,F]                            attrs kind: act(x[:, :F]) * x[:, F:]
  split_act_mul (gate[T,F], up[T,F]) -> [T,F]                     the same for two values
  rope_kv_write (qkv[T,(Hq+2Hk)*D], cos, sin, qw?, kw?, cache) -> (q[T,Hq,D], cache')
                                                                  attrs heads, kv_heads, head_dim, style, has_rope,
                                                                  has_qk_norm, norm kind/eps/offset; normalizes and rotates
                                                                  q and k, writes k and v at the step's slots. Queries
                                                                  are first, then keys, then values
  kv_write    (k[T,Hk,D], v[T,Hk,Dv], cache) -> cache'            the unfused form
  paged_attention (q[T,Hq,D], cache, sinks?) -> [T,Hq,Dv]         attrs of attention plus kv_heads, value_dim
  pointwise   (a[T,..], b, ..) -> [T,..]                          attrs expr over in0, in1 .., in the language of
                                                                  `kernels_templates.expression`, e.g.
                                                                  "(mul (silu in0) in1)"; inputs broadcast
"""

from __future__ import annotations
