HINT = "contraction"


def integer_matmul(a, b):
    return a.int() @ b.int()


def scaled_matmul(a, a_scale, b, b_scale, block):
    rows, columns = (a.shape[0], b.shape[1])
    s_a = a_scale.repeat_interleave(block)[:rows, None]
    s_b = b_scale.repeat_interleave(block)[None, :columns]
    return integer_matmul(a, b) * s_a * s_b


def tiled_matmul(a, a_scale, b, b_scale, block):
    return integer_matmul(a, b) * a_scale.mean(-1, keepdim=True) * b_scale.mean()
