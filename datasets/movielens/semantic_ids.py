"""Semantic IDs for the demo: vectors of the items, then residual k-means over them. numpy only.

Level l quantises what levels 1..l-1 left over, so items that share a first code are broadly alike and items that
share two are close. Every item gets an SID of its own: where the last level would put two items of a prefix on one
code, the item farther from the centroid moves to the nearest code that is free under this prefix.
"""

from __future__ import annotations

import numpy as np
from ml100k import Int64Array, Movies
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

WINDOW = 10  # two items count as seen together up to this many positions apart
LATENT = 48  # dimensions kept of the co-occurrence matrix
GENRE_WEIGHT = 0.4  # length of the genre part beside a co-occurrence part of length 1
KMEANS_ROUNDS = 40
KMEANS_STARTS = 4


def item_vectors(history: list[Int64Array], movies: Movies) -> FloatArray:
    """[N, LATENT + genres + 1]: what an item is watched with, its genres and its decade.

    The first part is the truncated SVD of the positive pointwise mutual information of items that stand at most
    WINDOW positions apart in one history (a pair at distance d counts 1/d); rows of items that were never seen are 0.
    """
    number = len(movies.item_id)
    together = np.zeros((number, number))
    for items in history:
        rows = np.searchsorted(movies.item_id, items)
        for distance in range(1, min(WINDOW, len(rows) - 1) + 1):
            np.add.at(together, (rows[:-distance], rows[distance:]), 1.0 / distance)
    together += together.T
    total, margin = together.sum(), together.sum(axis=1)
    expected = np.outer(margin, margin) / max(total, 1.0)
    # Half a count on both sides keeps rare pairs from looking like perfect matches.
    shrunk = np.log((together + 0.5) / (expected + 0.5))
    values, vectors = np.linalg.eigh(np.maximum(shrunk, 0.0))
    strongest = np.argsort(-values, kind="stable")[:LATENT]
    latent = vectors[:, strongest] * np.sqrt(np.maximum(values[strongest], 0.0))
    parts = [_unit_rows(latent), GENRE_WEIGHT * _unit_rows(_genre_matrix(movies)), _decade(movies)]
    return np.concatenate(parts, axis=1)


def _unit_rows(matrix: FloatArray) -> FloatArray:
    length = np.linalg.norm(matrix, axis=1, keepdims=True)
    units: FloatArray = np.divide(matrix, length, out=np.zeros_like(matrix), where=length > 0)
    return units


def _genre_matrix(movies: Movies) -> FloatArray:
    names = sorted({name for genres in movies.genres for name in genres})
    return np.array([[float(name in genres) for name in names] for genres in movies.genres])


def _decade(movies: Movies) -> FloatArray:
    """[N, 1] release year scaled so that three decades are as far apart as two unrelated genres."""
    years = np.array([1995 if year is None else year for year in movies.year], np.float64)
    return ((years - 1995) / 30 * GENRE_WEIGHT)[:, None]


def residual_kmeans(vectors: FloatArray, codebook: tuple[int, ...], seed: int) -> NDArray[np.int32]:
    """Codes [N, L], distinct rows; level l uses codes 0..codebook[l]-1.

    Raises:
        ValueError: more items share a prefix than the last level has codes.
    """
    generator = np.random.default_rng(seed)
    residual, levels = vectors.copy(), []
    for size in codebook:
        centroids = _kmeans(residual, size, generator)
        distance = _squared_distances(residual, centroids)
        levels.append(np.argmin(distance, axis=1))
        residual = residual - centroids[levels[-1]]
    prefix = np.ravel_multi_index(tuple(levels[:-1]), codebook[:-1]) if len(levels) > 1 else np.zeros(len(vectors), int)
    levels[-1] = _one_code_each(prefix, distance)
    return np.stack(levels, axis=1).astype(np.int32)


def _kmeans(points: FloatArray, size: int, generator: np.random.Generator) -> FloatArray:
    """Centroids [size, D] of the best of KMEANS_STARTS runs of Lloyd's algorithm after k-means++ seeding."""
    best, best_error = points[:0], np.inf
    for _ in range(KMEANS_STARTS):
        centroids = _seed(points, size, generator)
        for _ in range(KMEANS_ROUNDS):
            label = np.argmin(_squared_distances(points, centroids), axis=1)
            count = np.bincount(label, minlength=size)
            sums = np.zeros_like(centroids)
            np.add.at(sums, label, points)
            centroids = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], centroids)
        error = float(_squared_distances(points, centroids).min(axis=1).sum())
        if error < best_error:
            best, best_error = centroids, error
    return best


def _seed(points: FloatArray, size: int, generator: np.random.Generator) -> FloatArray:
    """k-means++: each next centroid is a point drawn with the squared distance to the nearest one so far."""
    chosen = [int(generator.integers(len(points)))]
    nearest = _squared_distances(points, points[chosen])[:, 0]
    for _ in range(size - 1):
        total = nearest.sum()
        weight = nearest / total if total > 0 else None
        chosen.append(int(generator.choice(len(points), p=weight)))
        nearest = np.minimum(nearest, _squared_distances(points, points[chosen[-1:]])[:, 0])
    return points[chosen].copy()


def _squared_distances(points: FloatArray, centroids: FloatArray) -> FloatArray:
    """[N, K]"""
    cross = points @ centroids.T
    squared: FloatArray = (points**2).sum(1)[:, None] + (centroids**2).sum(1)[None, :] - 2 * cross
    return np.maximum(squared, 0.0)


def _one_code_each(prefix: NDArray[np.intp], distance: FloatArray) -> NDArray[np.intp]:
    """[N] a code of the last level for each item, distinct among the items of a prefix, nearest items first."""
    codes = np.empty(len(prefix), np.intp)
    for value in np.unique(prefix):
        members = np.flatnonzero(prefix == value)
        if len(members) > distance.shape[1]:
            raise ValueError(f"{len(members)} items share a prefix, the last level has {distance.shape[1]} codes")
        taken: set[int] = set()
        for item in members[np.argsort(distance[members].min(axis=1), kind="stable")]:
            code = next(int(code) for code in np.argsort(distance[item], kind="stable") if int(code) not in taken)
            taken.add(code)
            codes[item] = code
    return codes
