"""The sums of tools/bench_kernels.py over the kernels of a step."""

from tools.bench_kernels import Span, summary, table


def test_pauses_are_the_times_without_a_kernel_on_any_stream() -> None:
    found = summary(
        [
            Span("nvjet_gemm", 10.0, 14.0),
            Span("triton_poi_fused", 3.0, 6.0),
            Span("Memcpy HtoD", 5.0, 9.0),  # at the same time, on another stream
            Span("triton_poi_fused", 7.0, 8.0),  # within the copy
            Span("nvjet_gemm", 14.01, 15.0),
        ]
    )
    assert (found.total, found.launches) == (12.0, 5)
    assert abs(found.busy - 10.99) < 1e-9  # 3 to 9, 10 to 14, 14.01 to 15
    assert found.groups.keys() == {"products", "fused by torch.compile", "copies"}
    assert found.kernels[0][0] == "nvjet_gemm" and found.kernels[0][2] == 2
    ((length, before, after),) = found.pauses  # 0.01 ms is too short
    assert (length, before, after) == (1.0, "Memcpy HtoD", "nvjet_gemm")
    assert "1.00 ms pause between Memcpy HtoD and nvjet_gemm" in table(found, most=3)
