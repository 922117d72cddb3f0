HINT = "range"


def soft_top_k(x, count, temperature):
    return count * (x / temperature).softmax(-1)
