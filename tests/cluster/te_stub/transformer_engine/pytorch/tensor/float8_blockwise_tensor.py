from . import QuantizedTensor


class Float8BlockwiseQTensor(QuantizedTensor): ...
