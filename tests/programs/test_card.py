"""What is read out of XLA's dump of a program's steps."""

from ninfer_jax.programs.card import shortest_path

DUMP = """\
001: kCopy         [source        | next=003 (2) ] kCopy
003: kCustomKernel [prev=002 (1)  | next=036 (33)] loop_select_fusion_10 grid: [1, 1, 1]
043: kConditional  [prev=037 (1)  | next=244 (1) ]
  false_branch:
    038: kCustomKernel [source       | next=146 (14)] one grid: [1, 1, 1]
    049: kConditional  [prev=046 (1) | next=050 (1) ]
      false_branch:
        No thunks.      true_branch:
        048: kCopy [source | sink] kCopy
    050: kCustomKernel [prev=049 (1) | next=051 (1) ] two grid: [64, 1, 1]
  true_branch:
    060: kCustomKernel [source       | next=146 (14)] three grid: [1, 1, 1]
    061: kConditional  [prev=046 (1) | next=050 (1) ]
      branch_0:
        062: kCopy [source | sink] kCopy
        063: kCopy [source | sink] kCopy
      branch_1:
        064: kCopy [source | sink] kCopy
        065: kCopy [source | sink] kCopy
        066: kCopy [source | sink] kCopy
244: kCustomKernel [prev=243 (1)  | next=254 (10)] input_reduce_fusion_25 grid: [1, 1, 1]
"""


def test_the_shortest_way_through_conditionals() -> None:
    """Outside 3. The first branch has 2 and a conditional that may do nothing, the second 1 and a conditional of 2 or 3."""
    assert shortest_path(DUMP) == 3 + 2
    longer = DUMP.replace(
        "    050: kCustomKernel [prev=049 (1) | next=051 (1) ] two grid: [64, 1, 1]\n", 3 * "    050: kCopy [a | b] kCopy\n"
    )
    assert shortest_path(longer) == 3 + 1 + 2
    assert shortest_path("") == 0
