"""M-RoPE positions: those of transformers, document by document, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.data.images.positions import axis_positions
from hp_core.model.tiny import tiny_skeleton

IMAGE = 90


def test_a_text_an_image_and_a_text_by_hand() -> None:
    """Two tokens, an image of 2 x 3 tokens, and two more."""
    is_image = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0, 0], dtype=bool)
    found = axis_positions(np.arange(10), is_image, np.array([[1, 2, 3]]))
    assert found.T.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_images_of_another_size_than_their_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="images of 6 tokens for 5 tokens of a row"):
        axis_positions(np.arange(8), np.arange(8) < 5, np.array([[1, 2, 3]]))


# A document: texts' lengths, with an image of so many rows and columns of tokens behind each but the last.
DOCUMENTS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)), max_size=3), st.integers(1, 4)
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS)
def test_packed_documents_have_the_positions_that_transformers_gives_each(
    documents: list[tuple[list[tuple[int, int, int]], int]],
) -> None:
    model = tiny_skeleton("qwen3_vl").model
    positions, ids, grids, wanted = [], [], [], []
    for images, last in documents:
        own: list[int] = []
        for text, height, width in images:
            own += [1] * text + [IMAGE] * (height * width)
        own += [1] * last
        grid = torch.tensor([[1, 2 * height, 2 * width] for _, height, width in images]).reshape(-1, 3)
        inputs = torch.tensor([own])
        kinds = (inputs == IMAGE).int()
        places, _ = model.get_rope_index(inputs, mm_token_type_ids=kinds, image_grid_thw=grid)
        wanted.append(places[:, 0].T.numpy())
        positions.append(np.arange(len(own)))
        ids += own
        grids += [(1, height, width) for _, height, width in images]
    found = axis_positions(
        np.concatenate(positions), np.array(ids) == IMAGE, np.array(grids, dtype=np.int64).reshape(-1, 3)
    )
    np.testing.assert_array_equal(found, np.concatenate(wanted))
