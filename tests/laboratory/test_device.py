"""The GPU results on the page, from a record; the measurement itself runs in tests/device/gpu_check.sh."""
from tests.laboratory import device, records


def test_tables_of_a_record(tmp_path, monkeypatch):
    kernels = {f"{device.COPY}: bytes": ("bytes", [2e9]), f"{device.COPY}: time": ("s", [1.0, 2.0, 1.0]),
               "encode sign: bytes": ("bytes", [1e9]), "encode sign: time": ("s", [1.0, 1.0, 9.0])}
    records.append("device", {"gpu": "a GPU", "what": "kernels"}, kernels, folder=tmp_path)
    allreduce = {f"{nbytes} {kind}": ("s", [time])
                 for nbytes in (1024, 4) for kind, time in (("ours", 1e-6), ("gloo", 3e-6), ("ours, CPU", 2e-6))}
    records.append("device", {"gpu": "a GPU", "what": "allreduce", "ranks": 2}, allreduce, folder=tmp_path)
    read = records.read
    monkeypatch.setattr(records, "read", lambda experiment, **setting: read(experiment, tmp_path, **setting))

    def cells(table):
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]

    assert cells(device.speeds()) == [["copy by the driver", "2", "100%"], ["encode sign", "1", "50%"]]
    assert cells(device.allreduces("2")) == [["4 B", "1", "3", "2"], ["1 KiB", "1", "3", "2"]]
    assert device.allreduces("4") == "Nothing measured yet."
