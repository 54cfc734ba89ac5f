"""The built-in workload googlenet-k80: GoogLeNet on one K80, measured by others.

    python benchmarks/workloads/googlenet_k80.py [--output FILE]

The figures are those of the authors of MG-WFBP (Shi et al., INFOCOM 2019), from
``logdata/tmpcomm.log`` of github.com/hclhkbu/B-Caffe. Their Caffe timed the backward pass
of each layer with parameters (weight and bias together, auxiliary heads included): what
ReLU, pooling and the other layers took is missing. They did not log the forward pass; their
own simulation takes it as half the backward pass, and so does this one.
"""

from common import write

from paceline.cluster.workload import Workload

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


def workload():
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


if __name__ == "__main__":
    write(workload(), "googlenet-k80")
