// Command franz is the driver of franz-go; see drivers/serving.py.
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

type record struct {
	Partition int32       `json:"partition"`
	Offset    int64       `json:"offset"`
	Key       *string     `json:"key"`
	Value     *string     `json:"value"`
	Timestamp int64       `json:"timestamp"`
	Headers   [][2]string `json:"headers"`
}

type request struct {
	Verb, Topic, Group, Name, Value, Compression, Acks, Reset string
	Partition, Total                                          int32
	Replicas                                                  int16
	Before, Timestamp                                         int64
	Partitions                                                json.RawMessage
	Config                                                    map[string]*string
	Topics                                                    []string
	Records                                                   []struct {
		Partition *int32
		Key       *string
		Value     *string
		Timestamp *int64
		Headers   [][2]string
	}
	Idempotent bool
	PaceMs     float64 `json:"pace_ms"`
	Count      int
	TimeoutS   float64 `json:"timeout_s"`
}

type driver struct {
	seeds       []string
	rack        string
	adminClient *kadm.Client
	group       *member
}

// member is a group member that tracks its assigned partitions.
type member struct {
	client   *kgo.Client
	lock     sync.Mutex
	assigned map[int32]bool
}

var errNoVerb = errors.New("no verb")

func data(text *string) []byte {
	if text == nil {
		return nil
	}
	value, err := base64.StdEncoding.DecodeString(*text)
	if err != nil {
		panic(err)
	}
	return value
}

func text(value []byte) *string {
	if value == nil {
		return nil
	}
	found := base64.StdEncoding.EncodeToString(value)
	return &found
}

func (d *driver) client(more ...kgo.Opt) (*kgo.Client, error) {
	options := []kgo.Opt{
		kgo.SeedBrokers(d.seeds...), kgo.FetchMaxWait(100 * time.Millisecond), kgo.Rack(d.rack),
		kgo.RetryTimeout(60 * time.Second), kgo.MetadataMinAge(250 * time.Millisecond),
	}
	return kgo.NewClient(append(options, more...)...)
}

func (d *driver) admin() (*kadm.Client, error) {
	if d.adminClient == nil {
		client, err := d.client()
		if err != nil {
			return nil, err
		}
		d.adminClient = kadm.NewClient(client)
	}
	return d.adminClient, nil
}

func (d *driver) respond(ctx context.Context, req *request) (any, error) {
	if found, err := d.records(ctx, req); !errors.Is(err, errNoVerb) {
		return found, err
	}
	admin, err := d.admin()
	if err != nil {
		return nil, err
	}
	if found, err := d.groups(ctx, admin, req); !errors.Is(err, errNoVerb) {
		return found, err
	}
	return d.topics(ctx, admin, req)
}

func (d *driver) topics(ctx context.Context, admin *kadm.Client, req *request) (any, error) {
	switch req.Verb {
	case "hello":
		return map[string]string{"client": "franz-go"}, nil
	case "create_topic":
		var partitions int32
		if err := json.Unmarshal(req.Partitions, &partitions); err != nil {
			return nil, err
		}
		_, err := admin.CreateTopic(ctx, partitions, req.Replicas, req.Config, req.Topic)
		return nil, err
	case "delete_topic":
		_, err := admin.DeleteTopic(ctx, req.Topic)
		return nil, err
	case "list_topics":
		found, err := admin.ListTopics(ctx)
		return found.Names(), err
	case "describe_topic":
		return describeTopic(ctx, admin, req.Topic)
	case "describe_cluster":
		found, err := admin.BrokerMetadata(ctx)
		brokers := []map[string]any{}
		for _, each := range found.Brokers {
			rack := ""
			if each.Rack != nil {
				rack = *each.Rack
			}
			brokers = append(brokers, map[string]any{"id": each.NodeID, "host": each.Host, "port": each.Port, "rack": rack})
		}
		return map[string]any{"brokers": brokers, "controller": found.Controller}, err
	case "create_partitions":
		found, err := admin.UpdatePartitions(ctx, int(req.Total), req.Topic)
		if err == nil {
			err = found.Error()
		}
		return nil, err
	case "describe_configs":
		found, err := admin.DescribeTopicConfigs(ctx, req.Topic)
		if err != nil {
			return nil, err
		}
		values := map[string]string{}
		for _, each := range found[0].Configs {
			values[each.Key] = each.MaybeValue()
		}
		return values, found[0].Err
	case "alter_config":
		change := kadm.AlterConfig{Op: kadm.SetConfig, Name: req.Name, Value: &req.Value}
		found, err := admin.AlterTopicConfigs(ctx, []kadm.AlterConfig{change}, req.Topic)
		if err == nil {
			err = found[0].Err
		}
		return nil, err
	case "delete_records":
		offsets := kadm.Offsets{}
		offsets.AddOffset(req.Topic, req.Partition, req.Before, -1)
		found, err := admin.DeleteRecords(ctx, offsets)
		if err != nil {
			return nil, err
		}
		one := found[req.Topic][req.Partition]
		return one.LowWatermark, one.Err
	case "watermarks":
		return watermarks(ctx, admin, req)
	case "offset_for_time":
		found, err := admin.ListOffsetsAfterMilli(ctx, req.Timestamp, req.Topic)
		if err != nil {
			return nil, err
		}
		one, _ := found.Lookup(req.Topic, req.Partition)
		return one.Offset, one.Err
	}
	return nil, fmt.Errorf("%w %s", errNoVerb, req.Verb)
}

func describeTopic(ctx context.Context, admin *kadm.Client, topic string) (any, error) {
	found, err := admin.ListTopics(ctx, topic)
	if err != nil {
		return nil, err
	}
	partitions := []map[string]any{}
	for _, each := range found[topic].Partitions.Sorted() {
		partitions = append(partitions, map[string]any{
			"id": each.Partition, "leader": each.Leader, "replicas": each.Replicas, "isr": each.ISR,
		})
	}
	return partitions, found[topic].Err
}

func watermarks(ctx context.Context, admin *kadm.Client, req *request) (any, error) {
	first, err := admin.ListStartOffsets(ctx, req.Topic)
	if err != nil {
		return nil, err
	}
	last, err := admin.ListEndOffsets(ctx, req.Topic)
	if err != nil {
		return nil, err
	}
	low, _ := first.Lookup(req.Topic, req.Partition)
	high, _ := last.Lookup(req.Topic, req.Partition)
	return []int64{low.Offset, high.Offset}, nil
}

func (d *driver) groups(ctx context.Context, admin *kadm.Client, req *request) (any, error) {
	switch req.Verb {
	case "group_open":
		return nil, d.open(req)
	case "group_poll":
		records, err := read(ctx, d.group.client, req.Count, req.TimeoutS)
		return map[string]any{"records": records, "assigned": d.group.sorted()}, err
	case "group_commit":
		return nil, d.group.client.CommitUncommittedOffsets(ctx)
	case "group_close":
		d.group.client.Close()
		d.group = nil
		return nil, nil
	case "committed":
		found, err := admin.FetchOffsets(ctx, req.Group)
		if err != nil {
			return nil, err
		}
		if one, exists := found.Lookup(req.Topic, req.Partition); exists {
			return one.At, one.Err
		}
		return -1, nil
	case "list_groups":
		found, err := admin.ListGroups(ctx)
		return found.Groups(), err
	case "describe_group":
		found, err := admin.DescribeGroups(ctx, req.Group)
		if err != nil {
			return nil, err
		}
		one := found[req.Group]
		return map[string]any{"state": strings.ToUpper(one.State), "members": len(one.Members)}, one.Err
	case "delete_group":
		found, err := admin.DeleteGroups(ctx, req.Group)
		if err == nil {
			err = found[req.Group].Err
		}
		return nil, err
	}
	return nil, errNoVerb
}

func (d *driver) open(req *request) error {
	opened := &member{assigned: map[int32]bool{}}
	change := func(isAssigned bool) func(context.Context, *kgo.Client, map[string][]int32) {
		return func(_ context.Context, _ *kgo.Client, changed map[string][]int32) {
			opened.lock.Lock()
			defer opened.lock.Unlock()
			for _, partitions := range changed {
				for _, partition := range partitions {
					if isAssigned {
						opened.assigned[partition] = true
					} else {
						delete(opened.assigned, partition)
					}
				}
			}
		}
	}
	client, err := d.client(
		kgo.ConsumerGroup(req.Group), kgo.ConsumeTopics(req.Topics...), kgo.DisableAutoCommit(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.SessionTimeout(10*time.Second),
		kgo.HeartbeatInterval(time.Second), kgo.OnPartitionsAssigned(change(true)),
		kgo.OnPartitionsRevoked(change(false)), kgo.OnPartitionsLost(change(false)),
	)
	opened.client, d.group = client, opened
	return err
}

func (m *member) sorted() []int32 {
	m.lock.Lock()
	defer m.lock.Unlock()
	found := []int32{}
	for partition := range m.assigned {
		found = append(found, partition)
	}
	sort.Slice(found, func(i, j int) bool { return found[i] < found[j] })
	return found
}

func (d *driver) records(ctx context.Context, req *request) (any, error) {
	switch req.Verb {
	case "produce":
		return d.produce(ctx, req)
	case "consume":
		return d.consume(ctx, req)
	}
	return nil, errNoVerb
}

var codecs = map[string]kgo.CompressionCodec{
	"": kgo.NoCompression(), "none": kgo.NoCompression(), "gzip": kgo.GzipCompression(),
	"snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
}

func (d *driver) produce(ctx context.Context, req *request) (any, error) {
	options := []kgo.Opt{
		kgo.ProducerBatchCompression(codecs[req.Compression]), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerLinger(2 * time.Millisecond),
	}
	switch req.Acks {
	case "0":
		options = append(options, kgo.RequiredAcks(kgo.NoAck()))
	case "1":
		options = append(options, kgo.RequiredAcks(kgo.LeaderAck()))
	}
	if !req.Idempotent {
		options = append(options, kgo.DisableIdempotentWrite())
	}
	client, err := d.client(options...)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	positions := make([][2]int64, len(req.Records))
	failures := make(chan error, len(req.Records))
	for number, sent := range req.Records {
		record := &kgo.Record{Topic: req.Topic, Key: data(sent.Key), Value: data(sent.Value)}
		if sent.Partition != nil {
			record.Partition = *sent.Partition
		}
		if sent.Timestamp != nil {
			record.Timestamp = time.UnixMilli(*sent.Timestamp)
		}
		for _, header := range sent.Headers {
			record.Headers = append(record.Headers, kgo.RecordHeader{Key: header[0], Value: data(&header[1])})
		}
		client.Produce(ctx, record, func(found *kgo.Record, err error) {
			positions[number] = [2]int64{int64(found.Partition), found.Offset}
			failures <- err
		})
		time.Sleep(time.Duration(req.PaceMs * float64(time.Millisecond)))
	}
	for range req.Records {
		if err := <-failures; err != nil {
			return nil, err
		}
	}
	return positions, nil
}

func (d *driver) consume(ctx context.Context, req *request) (any, error) {
	var wanted map[string]int64
	if err := json.Unmarshal(req.Partitions, &wanted); err != nil {
		return nil, err
	}
	offsets := map[int32]kgo.Offset{}
	for number, offset := range wanted {
		partition, err := strconv.Atoi(number)
		if err != nil {
			return nil, err
		}
		switch offset {
		case -2:
			offsets[int32(partition)] = kgo.NewOffset().AtStart()
		case -1:
			offsets[int32(partition)] = kgo.NewOffset().AtEnd()
		default:
			offsets[int32(partition)] = kgo.NewOffset().At(offset)
		}
	}
	reset := kgo.NewOffset().AtStart()
	if req.Reset == "none" {
		reset = kgo.NoResetOffset()
	}
	client, err := d.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{req.Topic: offsets}), kgo.ConsumeResetOffset(reset))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	timeout := req.TimeoutS
	if timeout == 0 {
		timeout = 30
	}
	return read(ctx, client, req.Count, timeout)
}

func read(ctx context.Context, client *kgo.Client, count int, seconds float64) ([]record, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(seconds*float64(time.Second)))
	defer cancel()
	found := []record{}
	for len(found) < count && ctx.Err() == nil {
		fetches := client.PollRecords(ctx, count-len(found))
		for _, failed := range fetches.Errors() {
			if !errors.Is(failed.Err, context.DeadlineExceeded) {
				return nil, failed.Err
			}
		}
		fetches.EachRecord(func(one *kgo.Record) {
			headers := [][2]string{}
			for _, header := range one.Headers {
				headers = append(headers, [2]string{header.Key, *text(header.Value)})
			}
			found = append(found, record{
				one.Partition, one.Offset, text(one.Key), text(one.Value), one.Timestamp.UnixMilli(), headers,
			})
		})
	}
	return found, nil
}

func code(err error) int16 {
	var found *kerr.Error
	if errors.As(err, &found) {
		return found.Code
	}
	return -1
}

func main() {
	var options struct{ Rack string }
	if err := json.Unmarshal([]byte(os.Args[2]), &options); err != nil {
		panic(err)
	}
	d := &driver{seeds: strings.Split(os.Args[1], ","), rack: options.Rack}
	lines, out := bufio.NewReaderSize(os.Stdin, 1<<20), json.NewEncoder(os.Stdout)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			break
		}
		var req request
		if err := json.Unmarshal(line, &req); err != nil {
			panic(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 85*time.Second)
		found, err := d.respond(ctx, &req)
		cancel()
		if err != nil {
			err = out.Encode(map[string]any{"error": code(err), "text": err.Error()})
		} else {
			err = out.Encode(map[string]any{"ok": found})
		}
		if err != nil {
			panic(err)
		}
	}
	if d.group != nil {
		d.group.client.Close()
	}
}
