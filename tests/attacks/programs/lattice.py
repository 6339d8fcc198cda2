"""Short integer relations, as an attacker would look for them."""

from __future__ import annotations

from collections.abc import Sequence

Row = list[int]


def short_relation(values: Sequence[int], modulus: int) -> Row:
    """Small m, not all zero, with <m, values> = 0 mod a prime; the first value is not 0."""
    pivot = pow(values[0], -1, modulus)
    rows = [[modulus, *[0] * (len(values) - 1)]]
    for i, value in enumerate(values[1:], 1):
        rows.append([-value * pivot % modulus, *[int(i == j) for j in range(1, len(values))]])
    _Reduction(rows).run()
    return min(rows, key=lambda row: _dot(row, row))


class _Reduction:
    """LLL in integers alone (Cohen, A Course in Computational Algebraic Number Theory, 2.6.7)."""

    def __init__(self, rows: list[Row]) -> None:
        self.b = rows
        self.lam = [[0] * len(rows) for _ in rows]
        self.d = [1]  # d[i + 1]: Gram determinant of the first i + 1 rows

    def run(self) -> None:
        self._orthogonalise(0)
        k = 1
        while k < len(self.b):
            if len(self.d) == k + 1:
                self._orthogonalise(k)
            self._reduce(k, k - 1)
            lam, d = self.lam, self.d
            if 4 * (d[k + 1] * d[k - 1] + lam[k][k - 1] ** 2) < 3 * d[k] ** 2:
                self._swap(k)
                k = max(1, k - 1)
            else:
                for j in range(k - 2, -1, -1):
                    self._reduce(k, j)
                k += 1

    def _orthogonalise(self, k: int) -> None:
        lam, d = self.lam, self.d
        for j in range(k + 1):
            u = _dot(self.b[k], self.b[j])
            for i in range(j):
                u = (d[i + 1] * u - lam[k][i] * lam[j][i]) // d[i]
            if j < k:
                lam[k][j] = u
            else:
                d.append(u)

    def _reduce(self, k: int, j: int) -> None:
        lam, d = self.lam, self.d
        if 2 * abs(lam[k][j]) <= d[j + 1]:
            return
        q = (2 * lam[k][j] + d[j + 1]) // (2 * d[j + 1])
        self.b[k] = [x - q * y for x, y in zip(self.b[k], self.b[j], strict=True)]
        lam[k][j] -= q * d[j + 1]
        for i in range(j):
            lam[k][i] -= q * lam[j][i]

    def _swap(self, k: int) -> None:
        lam, d, b = self.lam, self.d, self.b
        b[k], b[k - 1] = b[k - 1], b[k]
        for j in range(k - 1):
            lam[k][j], lam[k - 1][j] = lam[k - 1][j], lam[k][j]
        pivot = lam[k][k - 1]
        replaced = (d[k - 1] * d[k + 1] + pivot**2) // d[k]
        for i in range(k + 1, len(d) - 1):
            old = lam[i][k]
            lam[i][k] = (d[k + 1] * lam[i][k - 1] - pivot * old) // d[k]
            lam[i][k - 1] = (replaced * old + pivot * lam[i][k]) // d[k + 1]
        d[k] = replaced


def _dot(a: Row, b: Row) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
