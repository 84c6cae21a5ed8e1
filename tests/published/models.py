"""The parameters' shapes of the models in published tables."""

Shapes = list[tuple[int, ...]]


def convolution(out: int, into: int, kernel: int) -> Shapes:
    """A convolution without bias and its batch normalisation."""
    return [(out, into, kernel, kernel), (out,), (out,)]


def resnet18_cifar() -> Shapes:
    """ResNet-18 for 32 x 32 images, ten classes."""
    shapes, width = convolution(64, 3, 3), 64
    for out in (64, 128, 256, 512):
        for block in range(2):
            into = width if block == 0 else out
            shapes += convolution(out, into, 3) + convolution(out, out, 3)
            if into != out:
                shapes += convolution(out, into, 1)
        width = out
    return [*shapes, (10, 512), (10,)]


def lstm_wikitext2(vocabulary: int = 28869, hidden: int = 650, layers: int = 3) -> Shapes:
    """A language model of stacked LSTMs whose decoder shares the embedding."""
    shapes: Shapes = [(vocabulary, hidden)]
    for _ in range(layers):
        shapes += [(4 * hidden, hidden), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
    return [*shapes, (vocabulary,)]


def resnet50() -> Shapes:
    """ResNet-50 for ImageNet."""
    shapes, width = convolution(64, 3, 7), 64
    for middle, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += (
                convolution(middle, width, 1) + convolution(middle, middle, 3) + convolution(4 * middle, middle, 1)
            )
            if block == 0:
                shapes += convolution(4 * middle, width, 1)
            width = 4 * middle
    return [*shapes, (1000, 2048), (1000,)]


def alexnet_caffe() -> Shapes:
    """AlexNet with grouped convolutions, as in Caffe."""
    weights: Shapes = [
        (96, 3, 11, 11),
        (256, 48, 5, 5),
        (384, 256, 3, 3),
        (384, 192, 3, 3),
        (256, 192, 3, 3),
        (4096, 9216),
        (4096, 4096),
        (1000, 4096),
    ]
    return [shape for weight in weights for shape in (weight, weight[:1])]
