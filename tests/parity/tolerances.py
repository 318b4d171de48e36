"""How far results may lie from recorded ones, as a share of the largest recorded value, and why.

Recorded arrays come from another processor. What differs between processors is the order of sums: AVX2, AVX-512 and AMX
kernels, thread counts and tensor sizes group the products of a convolution or matrix product differently. A mistake in
the arithmetic (a sign, an index, an offset of a pixel) moves results by 1e-2 and more.
"""

from __future__ import annotations

# A few operations on the same inputs, such as the box coder: some multiples of float32's 6e-8.
ARITHMETIC = 1e-6

# float32 through a whole network. Each of up to 100 layers sums hundreds to thousands of products, and RoIAlign and
# softmax pass the differences on. Seen: up to 2.8e-4, at the end of an FPN detector on a processor without AVX-512.
NETWORK = 5e-4

# float32 gradients (L2 distance): a ReLU whose input is within the rounding of 0 passes a gradient in one result only.
# Seen: 4e-2 for an untrained ResNet-101, also between Detectron2's own gradients in float32 and float64.
GRADIENT = 5e-2

# float64, where the order of sums does not matter. But Detectron2 rounds the output of its box predictor to float32
# (6e-8 of logits and deltas up to 30), and a loss sums these errors over hundreds of RoIs. Seen: 1.7e-6 for a loss,
# also of Detectron2 itself; gradients pass the errors through the whole network.
LOSS_FLOAT64 = 1e-5
GRADIENT_FLOAT64 = 1e-4
