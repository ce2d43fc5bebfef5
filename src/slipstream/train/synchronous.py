"""placeholder"""


class Synchronous:
    def __init__(self, *a):
        raise NotImplementedError
